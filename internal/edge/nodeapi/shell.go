package nodeapi

import (
	"context"

	"connectrpc.com/connect"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/chronus/shells"
)

func (p processService) OpenShell(ctx context.Context, r *connect.Request[sandseav1.OpenShellRequest],
) (*connect.Response[sandseav1.OpenShellResponse], error) {
	u, err := opened(p.s, r, r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	defer u.Done()
	m := r.Msg
	sh, err := u.Shells.Open(ctx, shells.Open{
		Name: m.GetName(), Interpreter: m.GetInterpreter(), User: m.GetUser(), Cwd: m.GetCwd(), Env: m.GetEnv(),
		ReplaceEnv: m.GetEnvMode() == sandseav1.EnvMode_ENV_MODE_REPLACE, Login: m.GetLogin(), Key: m.GetKey(),
	})
	if err != nil {
		return nil, u.Because(ctx, err)
	}
	return connect.NewResponse(&sandseav1.OpenShellResponse{Shell: toShell(sh)}), nil
}

func toShell(sh shells.Shell) *sandseav1.Shell {
	return &sandseav1.Shell{
		Name: sh.Name, Interpreter: valid(sh.Interpreter), User: sh.User, Cwd: valid(sh.Cwd), OpenedAt: at(sh.Opened),
		NotKept: sh.NotKept,
	}
}

func (p processService) RunInShell(ctx context.Context, r *connect.Request[sandseav1.RunInShellRequest],
) (*connect.Response[sandseav1.RunInShellResponse], error) {
	u, err := opened(p.s, r, r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	defer u.Done()
	m := r.Msg
	ran, err := u.Shells.Run(ctx, shells.Run{
		Shell: m.GetShell(), Script: m.GetScript(), Input: m.Stdin, MergeStderr: m.GetMergeStderr(),
		Timeout: milliseconds(m.GetTimeoutMs()), Overflow: fromOverflow(m.GetOverflow()), Key: m.GetKey(),
		Note: m.GetNote(), MaxOutput: m.GetMaxOutputBytes(),
	})
	if err != nil {
		return nil, u.Because(ctx, err)
	}
	return connect.NewResponse(&sandseav1.RunInShellResponse{
		Run: toAnswer(ran.Answer), Shell: toShell(ran.Shell), SyntaxError: ran.SyntaxError, StateLost: ran.Lost,
	}), nil
}

func (p processService) CloseShell(ctx context.Context, r *connect.Request[sandseav1.CloseShellRequest],
) (*connect.Response[sandseav1.CloseShellResponse], error) {
	u, err := opened(p.s, r, r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	defer u.Done()
	if err := u.Shells.Close(ctx, r.Msg.GetShell()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&sandseav1.CloseShellResponse{}), nil
}
