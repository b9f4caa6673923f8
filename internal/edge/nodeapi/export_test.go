package nodeapi

// Waking is waking, for the test of the whole table.
func Waking(procedure string) (wakes, ok bool) { return waking(procedure) }
