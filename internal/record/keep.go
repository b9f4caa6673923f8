package record

// Keep says which part of a stream stays when a limit cuts it.
type Keep int

// What can stay.
const (
	// KeepEnds: the beginning and the end, half of the limit each.
	KeepEnds Keep = iota
	// KeepTail: the end.
	KeepTail
	// KeepHead: the beginning.
	KeepHead
)

// Caps bound one stream in this way; both ends together come to what DefaultCaps keep.
func (k Keep) Caps() Caps {
	all := DefaultCaps.Head + DefaultCaps.Tail
	switch k {
	case KeepTail:
		return Caps{Tail: all}
	case KeepHead:
		return Caps{Head: all}
	default:
		return DefaultCaps
	}
}
