"""`pdserve bench serve` and `bench capacity`: one server that runs already, measured under one load or under many."""
