package sandbox

import (
	"io"

	"github.com/sandsea/sandsea/internal/node"
)

// ID names a sandbox for ever: "s" and 26 letters of lower-case base32 without i, l, o, u (Crockford's alphabet), which
// is 130 bits: a random tag (100), the node's number (20), a check over both (10). The unguessable part comes first, so
// that the first 8 letters serve as the short form. One spelling; anything else is malformed. A valid DNS label.
type ID string

// Short is the form for people: the first 8 letters.
func (id ID) Short() string { return string(id[:min(8, len(id))]) }

// Mint makes an id for a sandbox on node n. It fails only when random does, or for a number beyond node.MaxNumber.
func Mint(n node.Number, random io.Reader) (ID, error) { panic("not written") }

// Parse accepts exactly what Mint makes.
func Parse(s string) (ID, error) { panic("not written") }

// Node is the number of the node that the id names.
func (id ID) Node() node.Number { panic("not written") }
