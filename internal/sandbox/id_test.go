package sandbox

import (
	"bytes"
	"crypto/rand"
	"errors"
	"strings"
	"testing"
	"testing/iotest"

	"pgregory.net/rapid"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/node"
)

func mint(t testing.TB, n node.Number) ID {
	t.Helper()
	id, err := Mint(n, rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestAMintedIDParsesAndNamesItsNode(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := node.Number(rapid.Uint32Range(1, uint32(node.MaxNumber)).Draw(t, "node"))
		raw := rapid.SliceOfN(rapid.Byte(), 13, 13).Draw(t, "random")
		id, err := Mint(n, bytes.NewReader(raw))
		if err != nil {
			t.Fatal(err)
		}
		if len(id) != 27 || strings.ToLower(string(id)) != string(id) || strings.ContainsAny(string(id[1:]), "ilou") {
			t.Fatalf("bad spelling %q", id)
		}
		got, err := Parse(string(id))
		if err != nil || got != id || got.Node() != n {
			t.Fatalf("Parse(%q) = %q of node %d, %v; want node %d", id, got, got.Node(), err, n)
		}
	})
}

func TestAllHundredRandomBitsAreInTheID(t *testing.T) {
	seen := map[ID]bool{}
	for bit := range 100 {
		raw := make([]byte, 13)
		raw[bit/8] = 0x80 >> (bit % 8)
		id, err := Mint(7, bytes.NewReader(raw))
		if err != nil {
			t.Fatal(err)
		}
		seen[id] = true
	}
	if len(seen) != 100 {
		t.Fatalf("%d different ids from 100 different tags", len(seen))
	}
}

func TestEveryWrongLetterIsRefused(t *testing.T) {
	id := string(mint(t, 4711))
	for i := range id {
		for _, c := range alphabet + "ilouILOUS-_ \x00" {
			bad := id[:i] + string(c) + id[i+1:]
			if bad == id {
				continue
			}
			if _, err := Parse(bad); !errors.Is(err, errdefs.Invalid) {
				t.Fatalf("Parse(%q) took a wrong letter at %d: %v", bad, i, err)
			}
		}
		if i > 1 && id[i] != id[i-1] {
			swapped := id[:i-1] + string(id[i]) + string(id[i-1]) + id[i+1:]
			if _, err := Parse(swapped); err == nil {
				t.Fatalf("Parse(%q) took swapped letters at %d", swapped, i)
			}
		}
	}
}

func TestOtherSpellingsAreRefused(t *testing.T) {
	id := string(mint(t, 1))
	for _, bad := range []string{"", "s", strings.ToUpper(id), id + "0", id[:26], " " + id, id + "\n", "x" + id[1:], strings.Repeat("s", 1000)} {
		if _, err := Parse(bad); !errors.Is(err, errdefs.Invalid) {
			t.Errorf("Parse(%.40q) = %v, want Invalid", bad, err)
		}
		if len(bad) != 27 && ID(bad).Node() != 0 {
			t.Errorf("%.40q names a node", bad)
		}
	}
}

func TestMintRefusesNumbersThatNoNodeHas(t *testing.T) {
	for _, n := range []node.Number{0, node.MaxNumber + 1} {
		if id, err := Mint(n, rand.Reader); err == nil {
			t.Errorf("Mint(%d) = %q", n, id)
		}
	}
	if _, err := Mint(1, iotest.ErrReader(errors.New("dry"))); err == nil {
		t.Error("Mint without random bytes succeeded")
	}
}

func FuzzParse(f *testing.F) {
	f.Add(string(mint(f, 1)))
	f.Add(string(mint(f, node.MaxNumber)))
	f.Add("s")
	f.Add("s0000000000000000000000000")
	f.Add("S" + strings.Repeat("0", 26))
	f.Fuzz(func(t *testing.T, s string) {
		id, err := Parse(s)
		if err != nil {
			if !errors.Is(err, errdefs.Invalid) {
				t.Fatalf("Parse(%q): %v is not Invalid", s, err)
			}
			return
		}
		if string(id) != s || id.Node() == 0 || id.Node() > node.MaxNumber || len(s) != 27 {
			t.Fatalf("Parse(%q) = %q of node %d", s, id, id.Node())
		}
	})
}
