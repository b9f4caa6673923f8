// Package errwire carries the errors of package errdefs over Connect and back without losing a field.
package errwire

import (
	"errors"
	"time"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
)

// codes gives each kind its one Connect code.
var codes = map[errdefs.Kind]connect.Code{
	errdefs.Invalid:            connect.CodeInvalidArgument,
	errdefs.NotFound:           connect.CodeNotFound,
	errdefs.AlreadyExists:      connect.CodeAlreadyExists,
	errdefs.FailedPrecondition: connect.CodeFailedPrecondition,
	errdefs.Denied:             connect.CodePermissionDenied,
	errdefs.Unauthenticated:    connect.CodeUnauthenticated,
	errdefs.Exhausted:          connect.CodeResourceExhausted,
	errdefs.Refused:            connect.CodeAborted,
	errdefs.Unavailable:        connect.CodeUnavailable,
	errdefs.Deadline:           connect.CodeDeadlineExceeded,
	errdefs.Canceled:           connect.CodeCanceled,
	errdefs.DataLoss:           connect.CodeDataLoss,
	errdefs.Lost:               connect.CodeDataLoss,
	errdefs.Unknown:            connect.CodeUnknown,
	errdefs.Internal:           connect.CodeInternal,
}

// Code gives the Connect code of a kind.
func Code(k errdefs.Kind) connect.Code {
	if c, ok := codes[k]; ok {
		return c
	}
	return connect.CodeInternal
}

// kinds is the way back for errors without a detail, as a proxy or the library itself makes them.
var kinds = map[connect.Code]errdefs.Kind{
	connect.CodeInvalidArgument:    errdefs.Invalid,
	connect.CodeOutOfRange:         errdefs.Invalid,
	connect.CodeNotFound:           errdefs.NotFound,
	connect.CodeAlreadyExists:      errdefs.AlreadyExists,
	connect.CodeFailedPrecondition: errdefs.FailedPrecondition,
	connect.CodePermissionDenied:   errdefs.Denied,
	connect.CodeUnauthenticated:    errdefs.Unauthenticated,
	connect.CodeResourceExhausted:  errdefs.Exhausted,
	connect.CodeAborted:            errdefs.Refused,
	connect.CodeUnavailable:        errdefs.Unavailable,
	connect.CodeDeadlineExceeded:   errdefs.Deadline,
	connect.CodeCanceled:           errdefs.Canceled,
	connect.CodeDataLoss:           errdefs.DataLoss,
	connect.CodeUnknown:            errdefs.Internal,
	connect.CodeInternal:           errdefs.Internal,
	connect.CodeUnimplemented:      errdefs.Invalid,
}

// Detail is err as a message; nil for nil.
func Detail(err error) *sandseav1.ErrorDetail {
	e := errdefs.From(err)
	if e == nil {
		return nil
	}
	return &sandseav1.ErrorDetail{
		Kind: string(e.Kind), Object: e.Object, Field: e.Field, Limit: e.Limit, Hint: e.HintText(),
		RetryAfterMs: e.RetryAfter.Milliseconds(), Retryable: e.Retryable(), Cause: e.Cause, Feature: e.Feature,
		Near: e.Near, Errno: int32(e.Errno), ErrnoName: e.ErrnoName, Stage: e.Stage,
	}
}

// FromDetail is the error that a detail and its sentence stand for.
func FromDetail(d *sandseav1.ErrorDetail, message string) *errdefs.Error {
	return &errdefs.Error{
		Kind: errdefs.Kind(d.GetKind()), Object: d.GetObject(), Msg: clip(message, d), Field: d.GetField(),
		Limit: d.GetLimit(), Hint: d.GetHint(), RetryAfter: time.Duration(d.GetRetryAfterMs()) * time.Millisecond,
		Cause: d.GetCause(), Feature: d.GetFeature(), Near: d.GetNear(), Errno: int(d.GetErrno()), ErrnoName: d.GetErrnoName(),
		Stage: d.GetStage(),
	}
}

// ToConnect makes the error that a handler returns. A *connect.Error without a kind of ours passes as it is.
func ToConnect(err error) error {
	if err == nil {
		return nil
	}
	if _, ours := errors.AsType[*errdefs.Error](err); !ours {
		if ce, ok := errors.AsType[*connect.Error](err); ok {
			return ce
		}
	}
	e := errdefs.From(err)
	ce := connect.NewError(Code(e.Kind), errors.New(e.Error()))
	if d, derr := connect.NewErrorDetail(Detail(e)); derr == nil {
		ce.AddDetail(d)
	}
	if e.RetryAfter > 0 {
		ce.Meta().Set("Retry-After", retryAfter(e.RetryAfter))
	}
	return ce
}

// FromConnect turns what a Connect client returned into an *errdefs.Error; errors that are not of Connect pass.
func FromConnect(err error) error {
	ce, ok := errors.AsType[*connect.Error](err)
	if !ok {
		return err
	}
	for _, d := range ce.Details() {
		v, verr := d.Value()
		if verr != nil {
			continue
		}
		if detail, ok := v.(*sandseav1.ErrorDetail); ok {
			return FromDetail(detail, ce.Message()).Wrap(err)
		}
	}
	kind, ok := kinds[ce.Code()]
	if !ok {
		kind = errdefs.Internal
	}
	return errdefs.New(kind, "", "%s", ce.Message()).Wrap(err)
}
