package nodeapi_test

import (
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/edge/runner/edgetest"
	"github.com/sandsea/sandsea/internal/testkit/wait"
)

func TestATerminalOverTheAPI(t *testing.T) {
	d := newDoor(t)
	id := d.create(t)
	st, err := d.proc.Start(t.Context(), connect.NewRequest(&sandseav1.StartRequest{
		Id: id, Command: &sandseav1.Command{Argv: []string{"size"}}, Detached: true,
		Terminal: &sandseav1.TerminalSize{Columns: 91, Rows: 17},
	}))
	if err != nil {
		t.Fatal(err)
	}
	for st.Receive() {
		p := st.Msg().GetEvent().GetStarted()
		if s := p.GetTerminal(); s.GetColumns() != 91 || s.GetRows() != 17 || !p.GetInputOpen() {
			t.Errorf("started: %v", p)
		}
	}
	st.Close()
	until := func(want string) {
		t.Helper()
		wait.Until(t, edgetest.Patience, func() bool {
			at, err := d.proc.Attach(t.Context(), connect.NewRequest(&sandseav1.AttachRequest{Id: id, Number: 1, NoFollow: true}))
			if err != nil {
				t.Fatal(err)
			}
			defer at.Close()
			var out []byte
			for at.Receive() {
				out = append(out, at.Msg().GetEvent().GetData().GetData()...)
			}
			return strings.HasPrefix(string(out), want)
		}, want)
	}
	until("91 17\r\n")
	resize := func(number int64, size *sandseav1.TerminalSize) error {
		_, err := d.proc.ResizeTTY(t.Context(), connect.NewRequest(&sandseav1.ResizeTTYRequest{Id: id, Number: number, Size: size}))
		return err
	}
	if err := resize(1, &sandseav1.TerminalSize{Columns: 30, Rows: 40}); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []*sandseav1.TerminalSize{nil, {Columns: 80}, {Columns: 1 << 16, Rows: 1}} {
		if err := resize(1, bad); kindOf(err) != errdefs.Invalid {
			t.Errorf("size %v: %v", bad, err)
		}
	}
	if err := resize(9, &sandseav1.TerminalSize{Columns: 30, Rows: 40}); kindOf(err) != errdefs.NotFound {
		t.Errorf("resize of nobody: %v", err)
	}
	closing := connect.NewRequest(&sandseav1.CloseInputRequest{Id: id, Number: 1})
	if _, err := d.proc.CloseInput(t.Context(), closing); kindOf(err) != errdefs.FailedPrecondition {
		t.Errorf("close the input: %v", err)
	}
	in := connect.NewRequest(&sandseav1.SendInputRequest{Id: id, Number: 1, Data: []byte("\n")})
	if _, err := d.proc.SendInput(t.Context(), in); err != nil {
		t.Fatal(err)
	}
	until("91 17\r\n\r\n30 40\r\n")
	list, err := d.proc.List(t.Context(), connect.NewRequest(&sandseav1.ListProcessesRequest{Id: id}))
	if err != nil || list.Msg.GetProcesses()[0].GetTerminal().GetRows() != 40 {
		t.Errorf("listed: %v, %v", list, err)
	}
}
