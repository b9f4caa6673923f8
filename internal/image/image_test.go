package image_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/image"
)

func layers(names ...string) []image.Layer {
	var out []image.Layer
	for _, n := range names {
		out = append(out, image.Layer{Digest: image.Digest(n)})
	}
	return out
}

func TestAConfigLaidOverAnother(t *testing.T) {
	base := image.Config{
		User: "root", Workdir: "/", Env: []string{"PATH=/bin", "A=1"}, Entrypoint: []string{"/e"}, Cmd: []string{"c"},
	}
	for name, tc := range map[string]struct{ over, want image.Config }{
		"nothing changes nothing": {image.Config{}, base},
		"variables merge by name and keep their place": {
			image.Config{Env: []string{"A=2", "B=3"}},
			image.Config{
				User: "root", Workdir: "/", Env: []string{"PATH=/bin", "A=2", "B=3"}, Entrypoint: []string{"/e"}, Cmd: []string{"c"},
			},
		},
		"a new entrypoint drops the old command": {
			image.Config{User: "u", Entrypoint: []string{"/f"}},
			image.Config{User: "u", Workdir: "/", Env: base.Env, Entrypoint: []string{"/f"}},
		},
		"a new command keeps the entrypoint": {
			image.Config{Workdir: "/w", Cmd: []string{"d"}},
			image.Config{User: "root", Workdir: "/w", Env: base.Env, Entrypoint: []string{"/e"}, Cmd: []string{"d"}},
		},
	} {
		if got := base.Over(tc.over); fmt.Sprintf("%q", got) != fmt.Sprintf("%q", tc.want) {
			t.Errorf("%s: got %q, want %q", name, got, tc.want)
		}
	}
}

func TestMergeEnvTakesManyVariables(t *testing.T) {
	var many []string
	for i := range 200_000 {
		many = append(many, fmt.Sprintf("v%d=%d", i, i))
	}
	begin := time.Now()
	got := image.MergeEnv([]string{"A=1", "bare"}, many, []string{"A=2", "v7=new", "bare"})
	want := append([]string{"A=2", "bare"}, many...)
	want[2+7] = "v7=new"
	if want = append(want, "bare"); !slices.Equal(got, want) {
		t.Errorf("%d variables, want %d", len(got), len(want))
	}
	if d := time.Since(begin); d > 5*time.Second {
		t.Errorf("took %s", d)
	}
}

func TestComposeStacksInOrderAndTakesALayerOnce(t *testing.T) {
	got, err := image.Compose(
		image.Image{Layers: layers("base1", "base2"), Config: image.Config{Env: []string{"A=1"}}},
		image.Image{Layers: layers("base1", "base2", "work")},
		image.Image{Layers: layers("tool", "base2"), Config: image.Config{Env: []string{"A=2"}}},
	)
	if err != nil {
		t.Fatal(err)
	}
	if want := layers("base1", "base2", "work", "tool"); !slices.Equal(got.Layers, want) {
		t.Errorf("layers %v, want %v", got.Layers, want)
	}
	if !slices.Equal(got.Config.Env, []string{"A=2"}) {
		t.Errorf("environment %v", got.Config.Env)
	}
	many := image.Image{}
	for i := range image.MaxLayers + 1 {
		many.Layers = append(many.Layers, layers(fmt.Sprint(i))...)
	}
	if _, err := image.Compose(image.Image{}, many); !errors.Is(err, errdefs.Invalid) {
		t.Errorf("%d layers: %v", len(many.Layers), err)
	}
}

func TestADefaultOfAnImageAboveDoesNotHideWhatTheBaseSays(t *testing.T) {
	base := image.Image{Layers: layers("go"), Config: image.Config{Env: []string{"PATH=/usr/local/go/bin:/bin", "A=1"}}}
	files := image.Image{Layers: layers("files"), Config: image.Config{Env: image.DefaultEnv()}}
	tools := image.Image{Layers: layers("tools"), Config: image.Config{Env: []string{"PATH=/tools:/bin", "LANG=C.UTF-8"}}}
	for name, tc := range map[string]struct {
		base  image.Image
		above []image.Image
		want  []string
	}{
		"a workspace of files": {base, []image.Image{files}, []string{"PATH=/usr/local/go/bin:/bin", "A=1", "LANG=C.UTF-8"}},
		"a path that is said":  {base, []image.Image{tools, files}, []string{"PATH=/tools:/bin", "A=1", "LANG=C.UTF-8"}},
		"nobody says one":      {files, []image.Image{files}, image.DefaultEnv()},
	} {
		got, err := image.Compose(tc.base, tc.above...)
		if err != nil || !slices.Equal(got.Config.Env, tc.want) {
			t.Errorf("%s: %q, %v, want %q", name, got.Config.Env, err, tc.want)
		}
	}
	if !slices.Equal(files.Config.Env, image.DefaultEnv()) {
		t.Errorf("the image above is changed: %q", files.Config.Env)
	}
}

func TestTheDigestCoversLayersAndConfigButNotTheName(t *testing.T) {
	base := image.Image{Name: "a", Layers: layers("x", "y"), Config: image.Config{User: "u", Cmd: []string{"a", "b"}}}
	same := base
	same.Name = "b"
	if base.Digest() != same.Digest() {
		t.Error("the name changes the digest")
	}
	for name, change := range map[string]func(*image.Image){
		"order of layers":           func(i *image.Image) { i.Layers = layers("y", "x") },
		"fewer layers":              func(i *image.Image) { i.Layers = layers("x") },
		"user":                      func(i *image.Image) { i.Config.User = "v" },
		"user against workdir":      func(i *image.Image) { i.Config.User, i.Config.Workdir = "", "u" },
		"command in other pieces":   func(i *image.Image) { i.Config.Cmd = []string{"ab"} },
		"command as the entrypoint": func(i *image.Image) { i.Config.Cmd, i.Config.Entrypoint = nil, []string{"a", "b"} },
	} {
		other := base
		change(&other)
		if other.Digest() == base.Digest() {
			t.Errorf("%s: the digest is the same", name)
		}
	}
}
