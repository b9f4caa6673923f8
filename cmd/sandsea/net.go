package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
)

func (a *app) netCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "net", Short: "See and change what leaves sandboxes",
		Example: `  sandsea net log -f s7q3k2m5
  sandsea net check s7q3k2m5 pypi:flask@3.1.0
  sandsea net set s7q3k2m5 --allow pypi --as-of 2024-06-01
  sandsea net phase s7q3k2m5 grade
  sandsea net top`,
	}
	cmd.AddCommand(a.netLogCommand(), a.netTopCommand(), a.netCheckCommand(), a.netSetCommand(), a.netPhaseCommand())
	return cmd
}

func (a *app) netSetCommand() *cobra.Command {
	var f networkFlags
	var phase string
	cmd := &cobra.Command{
		Use: "set ID [flags]", Short: "Change what may leave a sandbox", Args: cobra.ExactArgs(1),
		Long: `Replaces the sandbox's whole policy, or with --phase what may leave it in one phase; what endpoints may reach in that phase
stays. When it returns the new one is in force, and connections that it does not allow are being cut.

` + networkHelp,
		Example: `  sandsea net set s7q3k2m5 --allow pypi --allow example.org:443 --as-of 2024-06-01
  sandsea net set s7q3k2m5 --phase grade --allow pypi --deny pypi:flask
  sandsea net set s7q3k2m5 --file policy.toml
  sandsea inspect --json s7q3k2m5 | jq .spec.network > policy.json`,
		ValidArgsFunction: a.completeID,
		RunE: func(cmd *cobra.Command, args []string) error {
			if !f.given() {
				return usage(cmd, "net set: say what is let out by --allow, or give --file")
			}
			whole, err := f.policy(cmd)
			if err != nil {
				return err
			}
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if phase != "" {
				info, err := sb.Info(cmd.Context())
				if err != nil {
					return err
				}
				if whole, err = f.replaced(cmd, info, phase); err != nil {
					return err
				}
			}
			a.undone = "the policy may have changed: sandsea inspect " + short(sb.ID)
			info, err := sb.SetPolicy(cmd.Context(), whole)
			if err != nil {
				return err
			}
			return a.printInForce(info)
		},
	}
	f.register(cmd, "file")
	cmd.Flags().StringVar(&phase, "phase", "", "change this phase alone; the one in force stays so")
	_ = cmd.RegisterFlagCompletionFunc("phase", a.completePhase)
	return cmd
}

func (a *app) netPhaseCommand() *cobra.Command {
	return &cobra.Command{
		Use: "phase ID PHASE", Short: "Put another phase of a sandbox's policy in force", Args: cobra.ExactArgs(2),
		Example: "  sandsea net phase s7q3k2m5 grade",
		ValidArgsFunction: func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return a.completePhase(cmd, args, prefix)
			}
			return a.completeID(cmd, args, prefix)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			a.undone = "the phase may have changed: sandsea inspect " + short(sb.ID)
			info, err := sb.SetPhase(cmd.Context(), args[1])
			if err != nil {
				return err
			}
			return a.printInForce(info)
		},
	}
}

// printInForce says what holds now.
func (a *app) printInForce(sb *sandseav1.Sandbox) error {
	if a.json {
		return printJSON(a.io.Out, document("sandsea.sandbox/1", sb))
	}
	a.io.Note("sandbox %s: phase %s in force: %s", short(sb.GetId()), ui.Text(phaseWord(sb)), ui.Text(netSentence(sb)))
	return nil
}

// completePhase offers the phases of the sandbox that was named, if the server says them soon.
func (a *app) completePhase(cmd *cobra.Command, args []string, prefix string) (out []string, _ cobra.ShellCompDirective) {
	if len(args) == 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, stop := context.WithTimeoutCause(cmd.Context(), 200*time.Millisecond, errdefs.Deadline)
	defer stop()
	sb, err := a.sandbox(ctx, args[0])
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	info, err := sb.Info(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	for _, name := range phaseNames(info.GetSpec().GetNetwork()) {
		if strings.HasPrefix(name, prefix) {
			out = append(out, name)
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}

func (a *app) netCheckCommand() *cobra.Command {
	return &cobra.Command{
		Use: "check ID WHAT", Short: "Ask what a sandbox's policy would say", Args: cobra.ExactArgs(2),
		Long: `Nothing is sent. WHAT is a host or an address, with a port or that of HTTPS, or a package service, with a package and its
version if they matter. The exit code is 0 when it is allowed and 1 when it is not. Nobody asks a registry for the date of
a version: where a date decides, the answer says by which day it must have been published.`,
		Example: `  sandsea net check s7q3k2m5 example.org
  sandsea net check s7q3k2m5 udp://192.0.2.7:123
  sandsea net check s7q3k2m5 pypi
  sandsea net check s7q3k2m5 npm:@scope/name@1.2.3
  sandsea net check s7q3k2m5 git:git.example/team/repo`,
		ValidArgsFunction: a.completeID,
		RunE: func(cmd *cobra.Command, args []string) error {
			q, err := parseQuestion(args[1])
			if err != nil {
				return err
			}
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			answer, err := sb.Check(cmd.Context(), q)
			if err != nil {
				return err
			}
			if a.json {
				err = printJSON(a.io.Out, append(object{{"schema", "sandsea.net_check/1"}, {"sandbox", sb.ID}, {"asked", args[1]}},
					members(answer.ProtoReflect())...))
			} else {
				a.printAnswer(args[1], answer)
			}
			if err == nil && !answer.GetAllowed() {
				err = &exitError{code: 1}
			}
			return err
		},
	}
}

func (a *app) printAnswer(asked string, c *sandseav1.CheckNetworkResponse) {
	word, color := "ALLOW", ui.Green
	if !c.GetAllowed() {
		word, color = "DENY", ui.Red
	}
	line := fmt.Sprintf("  %s  %s  phase %s", ui.Text(asked), ui.Text(ruleWord(c.GetRule())), ui.Text(c.GetPhase()))
	fmt.Fprintln(a.io.Out, a.io.Paint(color, word)+line)
	if c.GetReason() != "" {
		fmt.Fprintln(a.io.Out, ui.Text(c.GetReason()))
	}
}

// parseQuestion reads host[:port], address, [address]:port, with udp:// or tcp:// before it, service[:package[@version]] or
// git:host/path.
func parseQuestion(text string) (*sandseav1.CheckNetworkRequest, error) {
	q := &sandseav1.CheckNetworkRequest{}
	service, name, _ := strings.Cut(text, ":")
	switch {
	case service == "git" && name != "":
		q.Service = text
		return q, nil
	case slices.Contains(packageServices, service):
		q.Service, q.Package = service, name
		if at := strings.LastIndexByte(name, '@'); at > 0 {
			q.Package, q.Version = name[:at], name[at+1:]
		}
		return q, nil
	}
	host := text
	if scheme, rest, ok := strings.Cut(text, "://"); ok {
		host = rest
		switch scheme {
		case "udp":
			q.Protocol = sandseav1.NetworkProtocol_NETWORK_PROTOCOL_UDP
		case "tcp":
			q.Protocol = sandseav1.NetworkProtocol_NETWORK_PROTOCOL_TCP
		default:
			return nil, badQuestion(text, "Write %s, or tcp:// or udp:// before it", ui.Text(strings.TrimSuffix(rest, "/")))
		}
	}
	if _, err := netip.ParseAddr(host); err == nil {
		q.Host = host
		return q, nil
	}
	if at := strings.LastIndexByte(host, ':'); at >= 0 {
		port, err := strconv.ParseUint(host[at+1:], 10, 16)
		if err != nil || port == 0 {
			return nil, badQuestion(text, "A port is 1 to 65535")
		}
		host, q.Port = host[:at], int32(port)
	}
	if inner, ok := strings.CutPrefix(host, "["); ok && strings.HasSuffix(inner, "]") {
		inner = strings.TrimSuffix(inner, "]")
		if _, err := netip.ParseAddr(inner); err == nil {
			q.Host = inner
			return q, nil
		}
	}
	if q.Host = host; host == "" || strings.ContainsAny(host, "[]/: ") {
		return nil, badQuestion(text, "Write host, host:port, or service:package@version")
	}
	return q, nil
}

func badQuestion(text, hint string, args ...any) error {
	return misuse(errdefs.New(errdefs.Invalid, "", "net check %s: neither a host nor a package", ui.Text(text)).WithHint(hint, args...))
}
