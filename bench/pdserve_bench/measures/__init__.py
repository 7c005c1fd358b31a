"""From records to figures. Pure: sends nothing, reads no clock."""
