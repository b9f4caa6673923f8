package names_test

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sandsea/sandsea/internal/aether/names"
)

var pool = netip.MustParsePrefix("198.18.0.0/15")

func TestATableIsOneToOneAndFull(t *testing.T) {
	table := names.New(pool)
	seen := map[netip.Addr]string{}
	for i := range names.Most {
		name := fmt.Sprintf("n%d.example", i)
		a, ok := table.Addr(name)
		if !ok || !pool.Contains(a) {
			t.Fatalf("%s: %v, %v", name, a, ok)
		}
		if other, taken := seen[a]; taken {
			t.Fatalf("%v stands for %s and %s", a, other, name)
		}
		if last := a.As4()[3]; last == 0 || last == 255 {
			t.Fatalf("%v looks like a network", a)
		}
		seen[a] = name
	}
	if a, ok := table.Addr("one.more.example"); ok {
		t.Fatalf("a full table gave %v", a)
	}
	for a, name := range seen {
		if got, ok := table.Name(a); !ok || got != name {
			t.Fatalf("%v stands for %q, want %q", a, got, name)
		}
		if again, ok := table.Addr(name); !ok || again != a {
			t.Fatalf("%s got %v, then %v", name, a, again)
		}
	}
}

func TestATableBuiltAnewGivesTheSameAddress(t *testing.T) {
	a, _ := names.New(pool).Addr("files.example")
	other := names.New(pool)
	other.Addr("first.example")
	if b, _ := other.Addr("files.example"); a != b {
		t.Errorf("got %v, before %v", b, a)
	}
	if _, ok := other.Name(netip.MustParseAddr("198.18.0.1")); ok {
		t.Error("an address that was never given stands for a name")
	}
}
