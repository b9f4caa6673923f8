package sandbox

import (
	"fmt"
	"io"
	"strings"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/node"
)

// ID names a sandbox for ever: "s" and 26 letters of lower-case base32 without i, l, o, u (Crockford's alphabet), which
// is 130 bits: a random tag (100), the node's number (20), a check over both (10). The unguessable part comes first, so
// that the first 8 letters serve as the short form. One spelling; anything else is malformed. A valid DNS label.
type ID string

const (
	alphabet    = "0123456789abcdefghjkmnpqrstvwxyz"
	idPrefix    = 's'
	idLen       = 27
	tagLetters  = 20
	nodeLetters = 4
	bodyLetters = tagLetters + nodeLetters
)

// Short is the form for people: the first 8 letters.
func (id ID) Short() string { return string(id[:min(8, len(id))]) }

// Mint makes an id for a sandbox on node n. It fails only when random does, or for a number beyond node.MaxNumber.
func Mint(n node.Number, random io.Reader) (ID, error) {
	if n == 0 || n > node.MaxNumber {
		return "", errdefs.New(errdefs.Internal, "", "no sandbox id can carry the node number %d", n)
	}
	var raw [13]byte // 104 bits, of which 100 are used
	if _, err := io.ReadFull(random, raw[:]); err != nil {
		return "", fmt.Errorf("read random bytes for a sandbox id: %w", err)
	}
	var v [bodyLetters]byte // values of 5 bits
	acc, bits, at := uint32(0), 0, 0
	for i := range tagLetters {
		for bits < 5 {
			acc = acc<<8 | uint32(raw[at])
			at, bits = at+1, bits+8
		}
		bits -= 5
		v[i] = byte(acc>>bits) & 31
	}
	for i := range nodeLetters {
		v[tagLetters+i] = byte(n>>(5*(nodeLetters-1-i))) & 31
	}
	c := check(v[:])
	out := make([]byte, 0, idLen)
	out = append(out, idPrefix)
	for _, x := range v {
		out = append(out, alphabet[x])
	}
	out = append(out, alphabet[c>>5], alphabet[c&31])
	return ID(out), nil
}

// Parse accepts exactly what Mint makes.
func Parse(s string) (ID, error) {
	v, ok := values(s)
	if !ok || check(v[:bodyLetters]) != uint16(v[bodyLetters])<<5|uint16(v[bodyLetters+1]) || number(v) == 0 {
		return "", errdefs.New(errdefs.Invalid, "", "%q is no sandbox id", clip(s)).WithField("id", "").
			WithHint("Give all 27 letters as create printed them")
	}
	return ID(s), nil
}

// Node is the number of the node that the id names; 0 for a string that is no id.
func (id ID) Node() node.Number {
	v, ok := values(string(id))
	if !ok {
		return 0
	}
	return number(v)
}

// values reads the 26 letters behind the prefix as numbers of 5 bits.
func values(s string) (v [idLen - 1]byte, ok bool) {
	if len(s) != idLen || s[0] != idPrefix {
		return v, false
	}
	for i := range v {
		x := strings.IndexByte(alphabet, s[i+1])
		if x < 0 {
			return v, false
		}
		v[i] = byte(x)
	}
	return v, true
}

func number(v [idLen - 1]byte) node.Number {
	var n node.Number
	for _, x := range v[tagLetters:bodyLetters] {
		n = n<<5 | node.Number(x)
	}
	return n
}

// check is a CRC of 10 bits (polynomial 0x233): it sees every wrong letter and every swap of two neighbours.
func check(v []byte) uint16 {
	crc := uint16(0x3ff)
	for _, x := range v {
		for b := 4; b >= 0; b-- {
			top := crc>>9 ^ uint16(x>>b)&1
			crc = crc << 1 & 0x3ff
			if top&1 == 1 {
				crc ^= 0x233
			}
		}
	}
	return crc
}

func clip(s string) string {
	if len(s) > 80 {
		return s[:80] + "..."
	}
	return s
}
