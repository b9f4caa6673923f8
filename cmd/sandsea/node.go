package main

import (
	"fmt"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

func (a *app) nodeCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "node", Short: "Show the machines that run sandboxes", Example: "  sandsea node ls"}
	cmd.AddCommand(&cobra.Command{
		Use: "ls", Short: "List nodes", Args: cobra.NoArgs,
		Example: "  sandsea node ls\n  sandsea node ls --json | jq '.[0].features'",
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			res, err := c.Nodes.List(cmd.Context(), connect.NewRequest(&sandseav1.ListNodesRequest{}))
			if err != nil {
				return err
			}
			if a.json {
				return printJSON(a.io.Out, documents("sandsea.node/1", res.Msg.GetNodes()))
			}
			a.printNodes(res.Msg.GetNodes())
			return nil
		},
	})
	return cmd
}

func (a *app) printNodes(list []*sandseav1.Node) {
	if len(list) == 0 {
		a.io.Note("No nodes. Start one: sudo sandsea up")
		return
	}
	var rows [][]ui.Cell
	for _, n := range list {
		state := ui.Cell{Text: enumWord(n.GetState().Descriptor(), n.GetState().Number()), Color: ui.Green}
		if n.GetState() != sandseav1.NodeState_NODE_STATE_READY {
			state.Color = ui.Red
		}
		rows = append(rows, []ui.Cell{
			{Text: ui.Text(n.GetName())},
			state,
			{Text: fmt.Sprintf("%d/%d", n.GetSandboxesRunning(), n.GetSandboxesMax())},
			{Text: fmt.Sprint(n.GetCpus())},
			{Text: ui.Size(n.GetMemoryPromisedBytes()) + "/" + ui.Size(n.GetMemoryBytes())},
			{Text: ui.Size(n.GetDiskFreeBytes())},
			{Text: ui.Text(n.GetKernel())},
		})
	}
	a.io.Table([]ui.Column{
		{Name: "NAME"},
		{Name: "STATE"},
		{Name: "SANDBOXES", Right: true},
		{Name: "CPUS", Right: true, Drop: 1},
		{Name: "MEM", Right: true, Drop: 2},
		{Name: "DISK", Right: true, Drop: 3},
		{Name: "KERNEL", Drop: 4},
	}, rows)
}

func (a *app) whoamiCommand() *cobra.Command {
	return &cobra.Command{
		Use: "whoami", Short: "Show who the token belongs to", Args: cobra.NoArgs,
		Example: "  sandsea whoami\n  sandsea whoami --json | jq -r .project",
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			res, err := c.IAM.WhoAmI(cmd.Context(), connect.NewRequest(&sandseav1.WhoAmIRequest{}))
			if err != nil {
				return err
			}
			if a.json {
				return printJSON(a.io.Out, document("sandsea.whoami/1", res.Msg))
			}
			fmt.Fprintf(a.io.Out, "%s, project %s, may %s; server %s at %s\n", ui.Text(res.Msg.GetPrincipal()), ui.Text(res.Msg.GetProject()),
				ui.Text(strings.Join(res.Msg.GetMay(), ", ")), ui.Text(res.Msg.GetVersion()), c.URL())
			return nil
		},
	}
}
