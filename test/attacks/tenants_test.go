package attacks

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/client"
)

// general are the calls that are about no sandbox of somebody, with the reason for which they need no entry in the matrix.
// A call that is neither here nor names a sandbox fails the test: its writer says which of the two it is.
var general = map[string]string{
	"SandboxService.Create":       "makes one of the caller's own; what it names as parent is looked at below",
	"SandboxService.CreateBatch":  "as Create",
	"SandboxService.List":         "lists by project: TestAKeyOfOneProjectSaysNothingToAnother",
	"SandboxService.Watch":        "tells by project, and of what is not there nothing: TestAStrangerWatchesNothing",
	"ImageService.Upload":         "the catalogue is the server's, not a project's",
	"ImageService.Import":         "as Upload",
	"ImageService.Get":            "as Upload",
	"ImageService.List":           "as Upload",
	"ImageService.Delete":         "as Upload",
	"ImageService.Compose":        "as Upload",
	"NodeService.Get":             "nodes are everybody's",
	"NodeService.List":            "as Get",
	"IAMService.WhoAmI":           "about the caller",
	"SandboxService.Capabilities": "about the nodes, the same for everybody",
}

func TestAStrangersTokenFindsNothing(t *testing.T) {
	h := attacked(t)
	seen := 0
	protoregistry.GlobalFiles.RangeFilesByPackage("sandsea.v1", func(f protoreflect.FileDescriptor) bool {
		for i := range f.Services().Len() {
			service := f.Services().Get(i)
			for j := range service.Methods().Len() {
				seen++
				m := service.Methods().Get(j)
				name := string(service.Name()) + "." + string(m.Name())
				t.Run(name, func(t *testing.T) { stranger(t, h, m, name) })
			}
		}
		return true
	})
	if seen < 25 {
		t.Errorf("only %d calls seen", seen)
	}
}

// stranger makes a call about red's sandbox as blue, then as red, whose it is.
func stranger(t *testing.T, h *house, m protoreflect.MethodDescriptor, name string) {
	victim := openAs(t, h.red)
	sh(t, victim, "echo red > /tmp/mine")
	number := int64(0)
	for ev, err := range victim.Start(within(t), &sandseav1.StartRequest{
		Command: client.Argv("cat"), Detached: true, Stdin: true,
	}) {
		if err != nil {
			t.Fatal(err)
		}
		if p := ev.GetStarted(); p != nil {
			number = p.GetNumber()
		}
	}
	if _, err := victim.OpenShell(within(t), &sandseav1.OpenShellRequest{Name: "owners", Interpreter: "sh"}); err != nil {
		t.Fatal(err)
	}
	before, err := victim.Info(within(t))
	if err != nil {
		t.Fatal(err)
	}
	req, about := fill(m.Input(), victim.ID, number)
	if _, is := general[name]; is {
		return
	}
	if !about {
		t.Fatal("it names no sandbox and is none of the general calls: which of the two is it?")
	}
	got := call(t, h, h.token(t, "blue"), m, req, patience)
	if got.found() {
		t.Errorf("a stranger gets %+v", got)
	}
	if strings.Contains(got.body, "default/red") || strings.Contains(got.body, "user:red") {
		t.Errorf("the answer tells whose it is: %s", got.body)
	}
	// A sandbox that never was looks the same.
	none := strings.ReplaceAll(string(req), victim.ID, otherID(victim.ID))
	if never := call(t, h, h.token(t, "blue"), m, []byte(none), patience); never.code != got.code && !never.found() {
		t.Errorf("one that is not there answers %q, red's %q", never.code, got.code)
	}
	after, err := victim.Info(within(t))
	if err != nil || after.GetState() != before.GetState() ||
		!after.GetExpiresAt().AsTime().Equal(before.GetExpiresAt().AsTime()) {
		t.Errorf("the sandbox was %v and is %v, %v", before, after, err)
	}
	if out := sh(t, victim, "cat /tmp/mine; ls /tmp"); out != "red\nmine\n" {
		t.Errorf("its files: %q", out)
	}
	procs, err := victim.Processes(within(t))
	if err != nil {
		t.Fatal(err)
	}
	if i := slices.IndexFunc(procs, func(p *sandseav1.Process) bool { return p.GetNumber() == number }); i < 0 ||
		procs[i].GetState() != sandseav1.ProcessState_PROCESS_STATE_RUNNING || !procs[i].GetInputOpen() {
		t.Errorf("its process: %v", procs)
	}
	// The same request finds it for its owner: what the stranger met was no other mistake.
	if own := call(t, h, h.token(t, "red"), m, req, 3*time.Second); !own.found() {
		t.Errorf("the owner gets %+v", own)
	}
}

// otherID is an id of the same form that belongs to nothing. Its check letters are wrong, so that a server that looks at
// them first may say "invalid".
func otherID(id string) string {
	b := []byte(id)
	for i := 1; i < 12; i++ {
		b[i] = '7'
	}
	return string(b)
}

// fill makes a request about a sandbox and reports whether the message names one.
func fill(d protoreflect.MessageDescriptor, id string, number int64) ([]byte, bool) {
	about := false
	var object func(d protoreflect.MessageDescriptor, depth int) map[string]any
	object = func(d protoreflect.MessageDescriptor, depth int) map[string]any {
		out := map[string]any{}
		for i := range d.Fields().Len() {
			f := d.Fields().Get(i)
			name := string(f.Name())
			switch {
			case name == "id" && depth < 2:
				about, out[name] = true, id
			case name == "ids":
				about, out[name] = true, []string{id}
			case name == "argv":
				out[name] = []string{"/bin/true"}
			case f.IsList() || f.IsMap():
			case name == "number":
				out[name] = number
			case name == "shell":
				out[name] = "owners"
			case name == "signal":
				out[name] = 18 // SIGCONT
			case strings.HasSuffix(name, "ttl_ms"):
				out[name] = 3_600_000
			case name == "no_follow":
				out[name] = true
			case name == "path" || name == "from":
				out[name] = "/etc/passwd"
			case name == "to":
				out[name] = "/etc/passwd.moved"
			case f.Kind() == protoreflect.MessageKind && depth < 3 && !strings.HasPrefix(string(f.Message().FullName()), "google."):
				if o := object(f.Message(), depth+1); len(o) > 0 {
					out[name] = o
				}
			}
		}
		return out
	}
	b, err := json.Marshal(object(d, 0))
	if err != nil {
		panic(err) // maps of strings, numbers and lists
	}
	return b, about
}

// answer is what a call came to.
type answer struct {
	code string // Connect's word for the error, "" for none
	body string
}

// found: the call was about something that is there. One without an end within the time counts.
func (a answer) found() bool {
	return a.code != "not_found" && !strings.Contains(a.body, `"kind":"not_found"`)
}

func (h *house) token(t *testing.T, name string) string {
	t.Helper()
	if h.tokens[name] == "" {
		t.Fatalf("no token of %s", name)
	}
	return h.tokens[name]
}

// call speaks Connect with JSON, so that it needs no generated code of the call. Within limit it is over or counts as found.
func call(t *testing.T, h *house, token string, m protoreflect.MethodDescriptor, req []byte, limit time.Duration) answer {
	t.Helper()
	ctx, stop := context.WithTimeoutCause(t.Context(), limit, errors.New("an endless stream"))
	defer stop()
	streams := m.IsStreamingClient() || m.IsStreamingServer()
	kind, body := "application/json", req
	if streams {
		kind = "application/connect+json"
		body = append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(req))), req...)
	}
	url := fmt.Sprintf("http://%s/%s/%s", h.Addr(), m.Parent().FullName(), m.Name())
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("Content-Type", kind)
	res, err := http.DefaultClient.Do(r)
	if err != nil && ctx.Err() != nil {
		return answer{}
	}
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	if err != nil && ctx.Err() == nil {
		t.Fatal(err)
	}
	out := answer{body: strings.ReplaceAll(string(b), `": "`, `":"`)}
	if !streams {
		var e struct{ Code string }
		if res.StatusCode != http.StatusOK {
			if err := json.Unmarshal(b, &e); err != nil {
				t.Fatalf("%s: %d %q", m.FullName(), res.StatusCode, b)
			}
		}
		out.code = e.Code
		return out
	}
	for len(b) >= 5 {
		size := int(binary.BigEndian.Uint32(b[1:5]))
		if size > len(b)-5 {
			break
		}
		if b[0]&2 != 0 {
			var end struct{ Error struct{ Code string } }
			if err := json.Unmarshal(b[5:5+size], &end); err != nil {
				t.Fatalf("%s: %q", m.FullName(), b)
			}
			out.code = end.Error.Code
		}
		b = b[5+size:]
	}
	return out
}

func TestAParentOfAnotherProjectGivesNothing(t *testing.T) {
	h := attacked(t)
	victim := openAs(t, h.red)
	sh(t, victim, "echo red > /root/mine")
	ofRed := func(s *sandseav1.SandboxSpec) { s.Parent = &sandseav1.Parent{Id: victim.ID} }
	sb, err := h.blue.Create(within(t), spec(ofRed), "")
	if err != nil {
		return // refused, which is as well
	}
	t.Cleanup(func() { stop(t, sb) })
	if out := sh(t, sb, "ls /root"); strings.Contains(out, "mine") {
		t.Errorf("it has the files of its parent: %q", out)
	}
}

func TestTheDoorsOfThePlatformAreRootsAlone(t *testing.T) {
	h := attacked(t)
	for _, name := range []string{"keeper.sock", "spawner.sock", "node.sock"} {
		st, err := os.Stat(filepath.Join(h.Dir, "run", name))
		if err != nil || st.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
	for _, name := range []string{"admin.token", "lock", "node.json"} {
		st, err := os.Stat(filepath.Join(h.Dir, name))
		if err != nil || st.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
	// No socket without a path, which every process in the machine's network could open.
	b, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 8 && strings.HasPrefix(f[7], "@") && strings.Contains(f[7], "sandsea") {
			t.Errorf("an abstract socket: %s", line)
		}
	}
}
