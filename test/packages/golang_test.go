package packages

import (
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"

	"github.com/sandsea/sandsea/internal/policy"
)

const goProgram = `mkdir -p /w && cd /w && cat >go.mod <<'E'
module w.example/w
go 1.21
require (
	golang.org/x/sync v0.7.0
	golang.org/x/text v0.14.0
)
E
cat >main.go <<'E'
package main

import (
	"golang.org/x/sync/errgroup"
	"golang.org/x/text/language"
)

func main() {
	var g errgroup.Group
	println(language.English.String(), g.Wait() == nil)
}
E
`

// goEnv keeps the client to what the image has.
const goEnv = "export PATH=$PATH:/usr/local/go/bin GOTOOLCHAIN=local CGO_ENABLED=0; "

func TestGoDownloadsAndBuildsAndTheSecondTimeFromTheCache(t *testing.T) {
	registry(t, policy.Golang, "/golang.org/x/text/@v/list")
	b := twice(t, policy.Golang, goEnv+goProgram+"go mod tidy && go mod download all", 3, goKit.use(t))
	// The checksum database was asked, through the mirror: its sums are in go.sum.
	b.sh(goEnv + "cd /w && test \"$(go env GOSUMDB)\" != off && grep 'golang.org/x/text v0.14.0 h1:' go.sum && go build -o w . && ./w 2>&1 | grep 'en true' && go mod verify")
}

func TestGoSeesTheWorldAsOfADate(t *testing.T) {
	const path = "github.com/google/uuid"
	url := registry(t, policy.Golang, "/golang.org/x/text/@v/list")
	at := day(t, "2022-06-01")
	var want []string
	late := ""
	for v := range strings.FieldsSeq(string(ask(t, url+"/"+path+"/@v/list", ""))) {
		if module.IsPseudoVersion(v) {
			continue // the go command does not list these
		}
		var info struct{ Time time.Time }
		askJSON(t, url+"/"+path+"/@v/"+v+".info", "", &info)
		if !info.Time.After(at) {
			want = append(want, v)
		} else {
			late = v
		}
	}
	semver.Sort(want)
	if len(want) == 0 || late == "" {
		t.Fatalf("versions until then: %v: the date proves nothing", want)
	}
	b := open(t, asOf(allow(policy.Golang), at), goKit.use(t))
	got := strings.Fields(b.sh(goEnv + "go list -m -versions " + path))[1:]
	if !slices.Equal(got, want) {
		t.Errorf("go list -m -versions: got %v, and the proxy dates %v until then", got, want)
	}
	last := want[len(want)-1]
	if got := strings.TrimSpace(b.sh(goEnv + "go list -m " + path + "@latest")); got != path+" "+last {
		t.Errorf("latest: got %s, want %s", got, last)
	}
	b.shortened(policy.Golang, path, "as_of 2022-06-01")
	b.refused(goEnv+"go mod download "+path+"@"+late, "403", path+" "+late, "as_of 2022-06-01")
	b.denied(policy.Golang, path, "as_of 2022-06-01")
}

func TestGoDoesNotFindWhatIsDeniedUnderAnyPath(t *testing.T) {
	registry(t, policy.Golang, "/golang.org/x/text/@v/list")
	p := allow(policy.Golang)
	p.Deny = []string{"git:github.com/go-yaml/yaml"}
	b := open(t, p, goKit.use(t))
	for _, m := range []string{
		"github.com/go-yaml/yaml@v2.1.0+incompatible", "gopkg.in/yaml.v3@v3.0.1", "gopkg.in/yaml.v2@v2.4.0", "github.com/Go-Yaml/YAML@latest",
	} {
		b.refused(goEnv+"go mod download "+m, "403", "deny git:github.com/go-yaml/yaml")
	}
	b.denied(policy.Golang, "gopkg.in/yaml.v3", "deny git:github.com/go-yaml/yaml")
	b.sh(goEnv + "go mod download golang.org/x/text@v0.14.0")
}
