package main

// The keys that a terminal session keeps for itself, at the beginning of a line only, as ssh does.
const escapeHelp = `~.  detach; the command goes on
~~  a tilde
~?  this list
At the beginning of a line only; everything else is the command's.`

// act is what a key asks of the session.
type act int

const (
	actNone act = iota
	actDetach
	actHelp
)

// escapes finds our keys in what is typed. Not safe for concurrent use.
type escapes struct {
	inside  bool // of a line: a tilde is a tilde
	pending bool // a tilde was typed at the beginning of a line
}

// next takes typed bytes up to the first act and gives what is the command's of them, the act, and what comes after it.
func (e *escapes) next(typed []byte) (send []byte, do act, rest []byte) {
	for i, c := range typed {
		if !e.pending {
			if c == '~' && !e.inside {
				e.pending = true
				continue
			}
			e.inside = c != '\r' && c != '\n'
			send = append(send, c)
			continue
		}
		e.pending = false
		switch c {
		case '.':
			return send, actDetach, typed[i+1:]
		case '?':
			return send, actHelp, typed[i+1:]
		case '~':
			send = append(send, '~')
		default:
			send = append(send, '~', c)
		}
		e.inside = c != '\r' && c != '\n'
	}
	return send, actNone, nil
}
