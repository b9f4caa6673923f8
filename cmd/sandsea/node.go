package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/cluster"
)

func (a *app) nodeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "node", Short: "Show the machines that run sandboxes, and invite more",
		Example: "  sandsea node ls\n  sandsea node invite n2 > n2.join",
	}
	cmd.AddCommand(a.inviteCommand())
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
			a.paged(cmd.Context(), func() { a.printNodes(res.Msg.GetNodes()) })
			return nil
		},
	})
	return cmd
}

func (a *app) inviteCommand() *cobra.Command {
	var file, data, store string
	cmd := &cobra.Command{
		Use: "invite NAME", Short: "Make the file with which a machine joins the cluster", Args: cobra.ExactArgs(1),
		Long: `Makes a key and a certificate for a node of that name and prints them, with the address of the store, as the file that
sandsea edge --join takes. It is for whoever can read the server's data directory, on the server's machine.
The file is a secret: who has it can act as that node. Move it by scp, and delete it when the node has joined.`,
		Example: "  sandsea node invite n2 > n2.join\n  sandsea node invite n2 --store 10.0.0.1:7071 > n2.join",
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := loadServerConfig(file, os.Getenv)
			if err != nil {
				return err
			}
			if cmd.Flags().Changed("data") {
				cfg.Data = data
			}
			if err := cfg.validate(); err != nil {
				return err
			}
			return a.invite((&dataDir{path: cfg.Data}).join("cluster"), args[0], store)
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "configuration file")
	cmd.Flags().StringVar(&data, "data", defaultServerConfig().Data, "data directory of the server")
	cmd.Flags().StringVar(&store, "store", "", "address, HOST:PORT, at which the node reaches the server (default: where it listens for nodes)")
	return cmd
}

func (a *app) invite(dir, name, store string) error {
	if a.io.OutTTY {
		return misuse(errdefs.New(errdefs.Invalid, "", "this prints a key, which does not belong on a terminal").
			WithHint("Write it to a file: sandsea node invite %s > %s.join", ui.Text(name), ui.Text(name)))
	}
	authority, err := cluster.OpenAuthority(dir)
	if err != nil {
		return err
	}
	v, err := authority.Invite(name, store, time.Now())
	if err != nil {
		return err
	}
	text, err := v.Encode()
	if err != nil {
		return err
	}
	if err := a.io.KeepOutPrivate(); err != nil {
		return err
	}
	if _, err := a.io.Out.Write(text); err != nil {
		return fmt.Errorf("write the invitation: %w", err)
	}
	a.io.Note("Secret: who has this file can act as node %s. Move it by scp, start there\n"+
		"  sudo sandsea edge --join FILE\nand delete every copy of it; the node keeps its own. It reaches the server at %s.", v.Name, v.Store)
	return nil
}

func (a *app) printNodes(list []*sandseav1.Node) {
	if len(list) == 0 {
		a.io.Note("No nodes. Start one: sudo sandsea up; or beside a sandsea server: sudo sandsea edge --join FILE")
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
