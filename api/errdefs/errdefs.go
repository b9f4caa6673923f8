// Package errdefs defines the kinds of error that cross package and process borders.
//
// Each kind has one Connect code (package errwire) and one retry rule. Code tests the kind with errors.Is(err,
// errdefs.NotFound), never the text. The kind is added once, at the place that knows; everybody else wraps with %w. A
// command's own failure is a result, not an error.
package errdefs

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Kind says what went wrong in the sense of what a caller may do next. A Kind is itself an error, so that it can be the
// target of errors.Is.
type Kind string

// The kinds, with their retry rules.
const (
	// Invalid: the request can never succeed as it is. No retry.
	Invalid Kind = "invalid"
	// NotFound: no such object in what the caller may see; another project's id looks the same. No retry.
	NotFound Kind = "not_found"
	// AlreadyExists: the name or key stands for something else. No retry.
	AlreadyExists Kind = "already_exists"
	// FailedPrecondition: the object's state or the node's abilities forbid it. No retry.
	FailedPrecondition Kind = "failed_precondition"
	// Denied: the caller may not. No retry.
	Denied Kind = "denied"
	// Unauthenticated: the caller is nobody. No retry.
	Unauthenticated Kind = "unauthenticated"
	// Exhausted: a limit or quota is met. Retry after RetryAfter.
	Exhausted Kind = "exhausted"
	// Refused: this node says no; internal, placement asks the next.
	Refused Kind = "refused"
	// Unavailable: a part is away. Retry.
	Unavailable Kind = "unavailable"
	// Deadline: time ran out before anything was decided.
	Deadline Kind = "deadline"
	// Canceled: the caller went away.
	Canceled Kind = "canceled"
	// DataLoss: recorded or stored bytes are gone or wrong.
	DataLoss Kind = "data_loss"
	// Lost: gone with its node. Never retried.
	Lost Kind = "lost"
	// Unknown: it may have happened. Retry with the same key only.
	Unknown Kind = "unknown"
	// Internal: a bug or a broken machine.
	Internal Kind = "internal"
)

// Kinds lists every kind, for tests that must cover them all.
var Kinds = []Kind{
	Invalid, NotFound, AlreadyExists, FailedPrecondition, Denied, Unauthenticated, Exhausted, Refused, Unavailable,
	Deadline, Canceled, DataLoss, Lost, Unknown, Internal,
}

// Error makes a Kind usable as the target of errors.Is.
func (k Kind) Error() string { return strings.ReplaceAll(string(k), "_", " ") }

// Error is an error with a kind and the facts that a person or program needs to act on it. Error() is one sentence that
// names the object, what happened and what to do.
type Error struct {
	Kind Kind
	// Object is what it is about, as "sandbox s7q3k2m5". May be empty.
	Object string
	// Msg is what happened, lower case, without a full stop.
	Msg string
	// Hint is what to do next, a sentence without its full stop. Filled from the kind when empty.
	Hint string
	// Field is the request field or flag at fault.
	Field string
	// Limit is the limit that was met, with its unit.
	Limit string
	// Cause is the typed end of a sandbox that has ended.
	Cause string
	// Feature is the missing kernel or node feature.
	Feature string
	// Near lists names that resemble the one not found.
	Near []string
	// RetryAfter is when a retry makes sense; 0 if unknown.
	RetryAfter time.Duration
	// Errno and ErrnoName tell a refused system call: 2, "ENOENT".
	Errno     int
	ErrnoName string
	// Stage is where a create failed: StageQueue, StageImage or StageStart.
	Stage string
	// Err is the error underneath, for logs; its text is not shown to callers.
	Err error
}

// The stages of a create.
const (
	StageQueue = "queue" // waiting for room
	StageImage = "image" // resolving, fetching and mounting what the root is made of
	StageStart = "start"
)

// AtStage says where a create failed, unless err says it already. nil stays nil.
func AtStage(err error, stage string) error {
	e := From(err)
	if e == nil || e.Stage != "" {
		return err
	}
	c := *e
	c.Stage, c.Err = stage, err
	return &c
}

// New makes an Error. The object may be empty.
func New(kind Kind, object, format string, args ...any) *Error {
	return &Error{Kind: kind, Object: object, Msg: fmt.Sprintf(format, args...)}
}

// WithHint sets what to do next.
func (e *Error) WithHint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}

// WithField names the request field or flag at fault and the limit it broke, which may be empty.
func (e *Error) WithField(field, limit string) *Error {
	e.Field, e.Limit = field, limit
	return e
}

// WithRetryAfter says when a retry makes sense.
func (e *Error) WithRetryAfter(d time.Duration) *Error {
	e.RetryAfter = d
	return e
}

// Wrap keeps the error underneath for errors.Is and for logs.
func (e *Error) Wrap(err error) *Error {
	e.Err = err
	return e
}

// Error is the sentence: "object: what happened. What to do". Of a sandbox that has ended, Cause being set, it is told:
// "sandbox s7q3k2m5 ended 3m ago: idle 300 s. …".
func (e *Error) Error() string {
	var b strings.Builder
	if e.Object != "" {
		b.WriteString(e.Object)
		if e.Cause == "" {
			b.WriteString(":")
		}
		b.WriteString(" ")
	}
	if e.Msg != "" {
		b.WriteString(e.Msg)
	} else {
		b.WriteString(e.Kind.Error())
	}
	if hint := e.HintText(); hint != "" {
		b.WriteString(". ")
		b.WriteString(hint)
	}
	return b.String()
}

// HintText is the hint, or the kind's general one.
func (e *Error) HintText() string {
	if e.Hint != "" {
		return e.Hint
	}
	return defaultHints[e.Kind]
}

// Is reports whether target is this error's kind.
func (e *Error) Is(target error) bool {
	k, ok := target.(Kind)
	return ok && k == e.Kind
}

// Unwrap gives the error underneath.
func (e *Error) Unwrap() error { return e.Err }

// Retryable reports whether the same call may be sent again unchanged (for Unknown: with the same key only).
func (e *Error) Retryable() bool {
	switch e.Kind {
	case Exhausted, Refused, Unavailable, Unknown:
		return true
	default:
		return false
	}
}

var defaultHints = map[Kind]string{
	Invalid:            "Correct the request",
	NotFound:           "List what there is",
	AlreadyExists:      "Choose another name or key",
	FailedPrecondition: "See its state: sandsea inspect",
	Denied:             "Ask an admin for the right",
	Unauthenticated:    "Set SANDSEA_TOKEN or SANDSEA_TOKEN_FILE",
	Exhausted:          "Free some or wait, then try again",
	Refused:            "Try another node",
	Unavailable:        "Try again",
	Deadline:           "Give it more time",
	Canceled:           "Send it again if it is still wanted",
	DataLoss:           "Read again from the start",
	Lost:               "Platform fault, not the task's. Create again",
	Unknown:            "Ask again with the same key",
	Internal:           "See the log of sandsea up",
}

// KindOf gives the kind of err: the nearest *Error's, else that of a context error, else Internal. nil has the empty
// kind.
func KindOf(err error) Kind {
	if err == nil {
		return ""
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Kind
	}
	if k, ok := errors.AsType[Kind](err); ok {
		return k
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return Deadline
	case errors.Is(err, context.Canceled):
		return Canceled
	}
	return Internal
}

// From gives the *Error in err, or a new one of KindOf(err) with err's text.
func From(err error) *Error {
	if err == nil {
		return nil
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	return &Error{Kind: KindOf(err), Msg: err.Error(), Err: err}
}
