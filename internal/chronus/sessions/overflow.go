package sessions

import (
	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/record"
)

// Overflow says what becomes of output beyond a limit, for each stream by itself: the limit of a Run's answer and that
// of the record. The command runs on in every case.
type Overflow string

// The policies.
const (
	OverflowHeadTail Overflow = "" // the first and the last bytes are kept
	OverflowTail     Overflow = "tail"
	OverflowHead     Overflow = "head"
	OverflowFail     Overflow = "fail" // as head, and the result says Exceeded
)

func (o Overflow) validate() error {
	switch o {
	case OverflowHeadTail, OverflowTail, OverflowHead, OverflowFail:
		return nil
	}
	return errdefs.New(errdefs.Invalid, "", "command.overflow: %s is not known", string(o)).
		WithField("command.overflow", "").WithHint("Use head_tail, tail, head or fail")
}

func (o Overflow) keep() record.Keep {
	switch o {
	case OverflowTail:
		return record.KeepTail
	case OverflowHead, OverflowFail:
		return record.KeepHead
	default:
		return record.KeepEnds
	}
}
