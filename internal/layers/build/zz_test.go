package build
import ("testing";"time")
func TestZZTwice(t *testing.T) {
	b, _ := testBuilder(t, Limits{})
	for range 3 {
		at := time.Now()
		r, err := b.Debian(t.Context(), DebianOptions{Suite: "bookworm", Refresh: false})
		must(t, err)
		t.Log(time.Since(at), r.Layers, r.Packages)
	}
}
