package sandbox

import "github.com/sandsea/sandsea/api/errdefs"

// Next is the only place where a sandbox changes state. Pure and total: an event that cannot happen in s is
// FailedPrecondition, and the status is returned unchanged. Suite: every pair of state and event.
//
// The first intent wins: once Stopping, later stops and the instance's own end change nothing. Every way to Ended leads
// through Stopping and EventReleased, so that a crash at any point finds either an instance to adopt or one to undo.
func Next(s Status, e Event) (Status, []Action, error) {
	switch s.State {
	case Creating:
		switch e.Kind {
		case EventStarted:
			return Status{State: Running}, []Action{ActionAnnounce}, nil
		case EventStartFail:
			return stopping(e, CauseInfraStart), undo(), nil
		case EventStop:
			return stopping(e, CauseStopped), undo(), nil
		case EventRecovered:
			// The edge died before it could say Running: nobody was told that this sandbox exists.
			return stopping(Event{Cause: CauseInfraInterrupted, Detail: e.Detail, By: ByPlatform}, ""), undo(), nil
		case EventGone, EventReleased:
		}
	case Running, Pausing, Paused, Resuming:
		switch e.Kind {
		case EventStop:
			return stopping(e, CauseStopped), kill(), nil
		case EventGone:
			return stopping(e, CauseInfraUnknown), kill(), nil
		case EventRecovered:
			if e.Found {
				return s, []Action{ActionAdopt, ActionAnnounce}, nil
			}
			return stopping(e, CauseInfraUnknown), undo(), nil
		case EventStarted, EventStartFail, EventReleased:
		}
	case Stopping:
		switch e.Kind {
		case EventStop, EventGone:
			return s, nil, nil
		case EventReleased:
			return Status{State: Ended, End: s.End}, []Action{ActionAnnounce}, nil
		case EventRecovered:
			if e.Found {
				return s, kill(), nil
			}
			return s, undo(), nil
		case EventStarted, EventStartFail:
		}
	case Ended:
		switch e.Kind {
		case EventStop:
			return s, nil, nil
		case EventRecovered:
			// The store may not have heard of it yet.
			return s, []Action{ActionAnnounce}, nil
		case EventStarted, EventStartFail, EventGone, EventReleased:
		}
	}
	return s, nil, errdefs.New(errdefs.FailedPrecondition, "sandbox", "%q cannot happen while it is %s", e.Kind, s.State)
}

// The words of End.By beside principals.
const (
	ByPlatform = "platform"
	ByWorkload = "workload"
)

func stopping(e Event, fallback Cause) Status {
	end := End{Cause: e.Cause, Detail: e.Detail, By: e.By}
	if end.Cause == "" {
		end.Cause = fallback
	}
	if end.By == "" {
		end.By = ByPlatform
	}
	return Status{State: Stopping, End: end}
}

func undo() []Action { return []Action{ActionAnnounce, ActionUndo, ActionRelease} }
func kill() []Action { return []Action{ActionAnnounce, ActionKill, ActionRelease} }
