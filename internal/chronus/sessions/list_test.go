package sessions_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/sandsea/sandsea/internal/chronus/sessions"
)

// text is how many bytes of text a list shows of a command.
func text(i sessions.Info) int {
	n := len(i.Command.User) + len(i.Command.Cwd)
	for _, a := range i.Command.Argv {
		n += len(a)
	}
	for k, v := range i.Command.Env {
		n += len(k) + len(v)
	}
	if i.Result != nil && i.Result.StartFailure != nil {
		n += len(i.Result.StartFailure.Message)
	}
	return n
}

func TestAListOfVeryManyLongCommandsIsBounded(t *testing.T) {
	r := newRig(t)
	s := cmd(append([]string{"no-such-program"}, strings.Fields(strings.Repeat("ä-long-argument ", 4000))...)...)
	s.Command.Cwd = "/" + strings.Repeat("d", 4000)
	s.Command.Env = map[string]string{"LONG": strings.Repeat("v", 10000)}
	r.run(s)
	one := r.table.List()[0]
	if n := text(one); n < 8000 || n > 17<<10 {
		t.Errorf("one command is shown with %d bytes", n)
	}

	r.mem.mu.Lock()
	var entry map[string]any
	for _, data := range r.mem.data {
		if err := json.Unmarshal(data, &entry); err != nil {
			t.Fatal(err)
		}
	}
	r.mem.mu.Unlock()
	const many = 5000
	records := map[string][]byte{}
	for n := range many {
		entry["number"] = n + 1
		data, err := json.Marshal(entry)
		if err != nil {
			t.Fatal(err)
		}
		records[fmt.Sprint(n)] = data
	}
	table := sessions.New(sessions.Config{ID: string(r.id), Dir: t.TempDir()})
	if err := table.Load(records); err != nil {
		t.Fatal(err)
	}
	sum := 0
	list := table.List()
	for _, i := range list {
		sum += text(i)
	}
	if len(list) != many || sum > 17<<20 {
		t.Errorf("%d commands are shown with %d bytes", len(list), sum)
	}
	argv := list[many-1].Command.Argv
	if argv[0] != "no-such-program" || !strings.HasPrefix(argv[len(argv)-1], "... (") {
		t.Errorf("shown as %q", argv)
	}
}
