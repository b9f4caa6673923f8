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
				docs, err := documents("sandsea.node/1", res.Msg.GetNodes())
				if err != nil {
					return err
				}
				return printJSON(a.io.Out, docs)
			}
			var rows [][]ui.Cell
			for _, n := range res.Msg.GetNodes() {
				rows = append(rows, []ui.Cell{
					{Text: n.GetName()}, {Text: strings.ToLower(strings.TrimPrefix(n.GetState().String(), "NODE_STATE_"))},
					{Text: fmt.Sprintf("%d/%d", n.GetSandboxesRunning(), n.GetSandboxesMax())}, {Text: fmt.Sprint(n.GetCpus())},
					{Text: ui.Size(n.GetMemoryPromisedBytes()) + "/" + ui.Size(n.GetMemoryBytes())}, {Text: ui.Size(n.GetDiskFreeBytes())},
					{Text: n.GetKernel()},
				})
			}
			a.io.Table([]ui.Column{
				{Name: "NAME"}, {Name: "STATE"}, {Name: "SANDBOXES", Right: true}, {Name: "CPUS", Right: true},
				{Name: "MEM", Right: true}, {Name: "DISK", Right: true, Drop: 1}, {Name: "KERNEL", Drop: 2},
			}, rows)
			return nil
		},
	})
	return cmd
}

func (a *app) whoamiCommand() *cobra.Command {
	return &cobra.Command{
		Use: "whoami", Short: "Show who the token belongs to", Args: cobra.NoArgs,
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
				doc, err := document("sandsea.whoami/1", res.Msg)
				if err != nil {
					return err
				}
				return printJSON(a.io.Out, doc)
			}
			fmt.Fprintf(a.io.Out, "%s, project %s, may %s; server %s at %s\n", ui.Text(res.Msg.GetPrincipal()), ui.Text(res.Msg.GetProject()),
				strings.Join(res.Msg.GetMay(), ", "), res.Msg.GetVersion(), c.URL())
			return nil
		},
	}
}
