package main

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/policy"
	"github.com/sandsea/sandsea/internal/sandboxpb"
)

// networkFlags say what may leave a sandbox.
type networkFlags struct {
	allow, deny []string
	asOf        string
	file        string
	// fileFlag is what the flag for the file is called here.
	fileFlag string
}

// defaultPhase is the phase of a policy that was given by flags.
const defaultPhase = "default"

// networkHelp is what commands with these flags say of them.
const networkHelp = `What no --allow names is rejected. Rules hold in order, and the first that matches decides:
  pypi, npm, golang, crates, debian, maven, rubygems     a package service
  git:git.example/team/repo                              a repository, or all below a path
  example.org  '*.example.org'  example.org:8443         a name, every name below it, with a port
  192.0.2.0/24:5432  udp://192.0.2.7:123                 addresses
  '!example.org'                                         rejects instead`

func (f *networkFlags) register(cmd *cobra.Command, fileFlag string) {
	f.fileFlag = fileFlag
	fl := cmd.Flags()
	fl.StringArrayVar(&f.allow, "allow", nil, "let out, as pypi, example.org:443, or '!…' to reject (all forms: sandsea net set --help)")
	fl.StringVar(&f.asOf, "as-of", "", "package services show the world of that moment, as 2024-06-01")
	fl.StringArrayVar(&f.deny, "deny", nil, "package that does not exist, as pypi:flask or npm:left-pad@1.3.0")
	fl.StringVar(&f.file, fileFlag, "", "file with the whole policy, TOML or JSON")
	_ = cmd.RegisterFlagCompletionFunc("allow", cobra.FixedCompletions(packageServices, cobra.ShellCompDirectiveNoFileComp))
	for _, name := range []string{"as-of", "deny"} {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions)
	}
}

// given reports whether any of the flags was.
func (f *networkFlags) given() bool {
	return len(f.allow) > 0 || len(f.deny) > 0 || f.asOf != "" || f.file != ""
}

// policy is what the flags ask for, nil when none was given.
func (f *networkFlags) policy(cmd *cobra.Command) (*sandseav1.NetworkPolicy, error) {
	if !f.given() {
		return nil, nil
	}
	if f.file != "" {
		if len(f.allow) > 0 || len(f.deny) > 0 || f.asOf != "" {
			return nil, usage(cmd, "%s: --%s holds the whole policy; --allow, --deny and --as-of go without it", cmd.Name(), f.fileFlag)
		}
		return readPolicy(f.fileFlag, f.file)
	}
	phase, services, err := f.phase(defaultPhase)
	if err != nil {
		return nil, err
	}
	p := &sandseav1.NetworkPolicy{Services: services, AsOf: phase.GetAsOf(), Deny: phase.GetDeny()}
	if len(phase.GetRules()) > 0 {
		p.Phases = []*sandseav1.NetworkPhase{{Name: phase.GetName(), Rules: phase.GetRules()}}
	}
	return p, nil
}

// phase is what the flags ask for as one phase, and apart from it the package services, which hold before its rules.
func (f *networkFlags) phase(name string) (*sandseav1.NetworkPhase, map[string]bool, error) {
	rules, services, err := f.rules()
	if err != nil {
		return nil, nil, err
	}
	asOf, err := parseAsOf(f.asOf)
	if err != nil {
		return nil, nil, err
	}
	out := sandboxpb.FromPolicy(policy.Policy{Phases: []policy.Phase{{Name: name, Rules: rules, Deny: f.deny}}}).GetPhases()[0]
	out.AsOf = asOf
	return out, services, nil
}

func (f *networkFlags) rules() (rules []policy.Rule, services map[string]bool, err error) {
	services = map[string]bool{}
	for _, text := range f.allow {
		r, err := policy.Parse(text)
		if err != nil {
			e := *errdefs.From(err)
			e.Msg = fmt.Sprintf("--allow %s: no network rule", ui.Text(text))
			return nil, nil, misuse(e.WithField("allow", ""))
		}
		if !slices.Contains(packageServices, r.Service) {
			rules = append(rules, r)
			continue
		}
		if before, twice := services[r.Service]; twice && before == r.Reject {
			return nil, nil, misuse(errdefs.New(errdefs.Invalid, "", "--allow %s: %s is both allowed and rejected", ui.Text(text), r.Service).
				WithField("allow", "").WithHint("Leave one of them out"))
		}
		services[r.Service] = !r.Reject
	}
	return rules, services, nil
}

// packageServices are the names of package services, sorted.
var packageServices = []string{
	policy.Crates, policy.Debian, policy.Golang, policy.Maven, policy.NPM, policy.PyPI, policy.RubyGems,
}

// parseAsOf reads a moment: a day, which is its first moment in UTC, or RFC 3339.
func parseAsOf(text string) (*timestamppb.Timestamp, error) {
	if text == "" {
		return nil, nil
	}
	for _, layout := range []string{time.DateOnly, time.RFC3339} {
		if t, err := time.Parse(layout, text); err == nil {
			return timestamppb.New(t), nil
		}
	}
	return nil, misuse(errdefs.New(errdefs.Invalid, "", "--as-of %s: no date", ui.Text(text)).WithField("as-of", "").
		WithHint("Write it as 2024-06-01 or 2024-06-01T12:00:00Z"))
}

// replaced is a policy with one phase replaced, or added, by what the flags ask for. The phase in force stays so.
func (f *networkFlags) replaced(cmd *cobra.Command, sb *sandseav1.Sandbox, name string) (*sandseav1.NetworkPolicy, error) {
	if f.file != "" {
		return nil, usage(cmd, "net set: --%s holds all phases; --phase goes without it", f.fileFlag)
	}
	phase, services, err := f.phase(name)
	if err != nil {
		return nil, err
	}
	p := sb.GetSpec().GetNetwork()
	if p == nil {
		p = &sandseav1.NetworkPolicy{}
	}
	var first []*sandseav1.NetworkRule
	for _, s := range slices.Sorted(maps.Keys(services)) {
		if all, fixed := p.GetServices()[s]; fixed && all != services[s] {
			word := map[bool]string{true: "allows", false: "rejects"}[all]
			return nil, errdefs.New(errdefs.FailedPrecondition, "sandbox "+short(sb.GetId()), "its policy %s %s in every phase, before the rules", word, s).
				WithField("allow", "").WithHint("Replace the whole policy: without --phase, or by --%s", f.fileFlag)
		}
		first = append(first, &sandseav1.NetworkRule{Reject: !services[s], Target: &sandseav1.NetworkRule_Service{Service: s}})
	}
	phase.Rules = append(first, phase.GetRules()...)
	at := slices.IndexFunc(p.GetPhases(), func(ph *sandseav1.NetworkPhase) bool { return ph.GetName() == name })
	if at < 0 {
		p.Phases = append(p.Phases, phase)
	} else {
		phase.Inbound, phase.InboundClosed = p.Phases[at].GetInbound(), p.Phases[at].GetInboundClosed() // no flag is about these
		p.Phases[at] = phase
	}
	p.Phase = sb.GetNetworkPhase()
	return p, nil
}
