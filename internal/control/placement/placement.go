// Package placement chooses the node for a new sandbox.
//
// Pick is pure: a few nodes are sampled from a view that may be stale, what this server itself placed since that view
// was taken is added on top, and the least loaded of the sample wins. Choosing the least loaded of all nodes instead
// makes every server choose the same one: with a second-old view 85 % of such choices are refused. The node's own
// refusal is the last word; the caller notes it in the Overlay and picks again. Nothing here is durable.
package placement

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/node"
)

// K is how many nodes a choice looks at.
const K = 3

// Stale is the age at which a node in the view counts as unreachable.
const Stale = 10 * time.Second

// Need is what a sandbox asks of its node.
type Need struct {
	Memory    int64 // bytes
	CPUMillis int64
	Pids      int64
	// Missing gives the first feature that the node does not enforce, as sandbox.Spec.Missing does; nil needs none.
	Missing func(node.Capabilities) (f node.Feature, field string, missing bool)
}

// reason is why a node cannot be chosen.
type reason int

const (
	fits reason = iota
	tried
	cordoned
	unreachable
	memorySize
	cpuSize
	pidsSize
	feature
	sandboxesFull
	memoryFull
	startsFull
	reasons
)

var reasonText = [reasons]string{
	tried: "refused it just now", cordoned: "cordoned", unreachable: "unreachable", memorySize: "too little memory",
	cpuSize: "too few CPUs", pidsSize: "too few process ids", feature: "cannot enforce it",
	sandboxesFull: "at its sandbox limit",
	memoryFull:    "memory is promised", startsFull: "at its start limit",
}

// Pick samples K nodes that can serve the need and takes the least loaded after the overlay of own recent choices. Same
// inputs, same answer. When no node can: Unavailable if none is there or reachable, FailedPrecondition if none enforces
// what is needed, else Exhausted with a count per reason; RetryAfter is set when waiting can help.
func Pick(v node.View, o *Overlay, n Need, not []node.Number, now time.Time, r *rand.Rand) (node.Ref, error) {
	count := len(v.Nodes)
	var sample [K]int
	found := 0
	// Most nodes fit most of the time: a few draws find a sample without looking at all of them.
	for draws := 0; draws < 4*K && found < K && count > 2*K; draws++ {
		i := r.IntN(count)
		if slices.Contains(sample[:found], i) {
			continue
		}
		if why, _, _ := judge(&v.Nodes[i], o, n, not, now); why == fits {
			sample[found] = i
			found++
		}
	}
	if found < K {
		var err error
		if sample, found, err = scan(v, o, n, not, now, r); err != nil {
			return node.Ref{}, err
		}
	}
	best, least := sample[0], load(&v.Nodes[sample[0]], o, n)
	for _, i := range sample[1:found] {
		if l := load(&v.Nodes[i], o, n); l < least {
			best, least = i, l
		}
	}
	return v.Nodes[best].Ref, nil
}

// scan looks at every node: a uniform sample of those that fit, or why none does.
func scan(v node.View, o *Overlay, n Need, not []node.Number, now time.Time, r *rand.Rand) ([K]int, int, error) {
	var sample [K]int
	var whys [reasons]int
	fitting := 0
	var lacks node.Feature
	var field string
	for i := range v.Nodes {
		why, f, fieldOf := judge(&v.Nodes[i], o, n, not, now)
		whys[why]++
		if why == feature {
			lacks, field = f, fieldOf
		}
		if why != fits {
			continue
		}
		if fitting < K {
			sample[fitting] = i
		} else if j := r.IntN(fitting + 1); j < K {
			sample[j] = i
		}
		fitting++
	}
	if fitting > 0 {
		return sample, min(fitting, K), nil
	}
	return sample, 0, explain(v, n, whys, lacks, field)
}

// judge says why e cannot serve the need, the cheapest checks first.
func judge(e *node.Entry, o *Overlay, n Need, not []node.Number, now time.Time) (reason, node.Feature, string) {
	switch {
	case slices.Contains(not, e.Number):
		return tried, node.Feature{}, ""
	case e.Cordoned:
		return cordoned, node.Feature{}, ""
	case now.Sub(e.SeenAt) > Stale:
		return unreachable, node.Feature{}, ""
	case n.Memory > e.Capabilities.Memory:
		return memorySize, node.Feature{}, ""
	case e.Load.MaxCPUMillis > 0 && n.CPUMillis > e.Load.MaxCPUMillis:
		// More CPUs than the node has are fine: a limit is a ceiling, and a node promises more than it has.
		return cpuSize, node.Feature{}, ""
	case e.Capabilities.PidMax > 0 && n.Pids > e.Capabilities.PidMax:
		return pidsSize, node.Feature{}, ""
	}
	own := o.since(e.Number, e.SeenAt)
	l := &e.Load
	switch {
	case l.MaxSandboxes > 0 && l.Sandboxes+own.sandboxes >= l.MaxSandboxes:
		return sandboxesFull, node.Feature{}, ""
	case l.MaxMemory > 0 && l.Memory+own.memory+n.Memory > l.MaxMemory:
		return memoryFull, node.Feature{}, ""
	case l.MaxStarting > 0 && l.Starting >= l.MaxStarting:
		return startsFull, node.Feature{}, ""
	}
	if n.Missing != nil {
		if f, field, missing := n.Missing(e.Capabilities); missing {
			return feature, f, field
		}
	}
	return fits, node.Feature{}, ""
}

// load is how full a node is, 0 to 1, by whatever is scarcest; a node that refused since it was last seen counts as
// full, since it knows better than the view.
func load(e *node.Entry, o *Overlay, n Need) float64 {
	own := o.since(e.Number, e.SeenAt)
	l := &e.Load
	var most float64
	if of := max(l.MaxMemory, e.Capabilities.Memory); of > 0 {
		most = float64(l.Memory+own.memory+n.Memory) / float64(of)
	}
	if l.MaxSandboxes > 0 {
		most = max(most, float64(l.Sandboxes+own.sandboxes)/float64(l.MaxSandboxes))
	}
	if l.MaxCPUMillis > 0 {
		most = max(most, float64(l.CPUMillis+n.CPUMillis)/float64(l.MaxCPUMillis))
	}
	if l.MaxStarting > 0 {
		// Starts finish soon, so they weigh little unless the limit is near.
		s := float64(l.Starting) / float64(l.MaxStarting)
		most += s * s / 10
	}
	if own.refused {
		most++
	}
	return most
}

func explain(v node.View, n Need, whys [reasons]int, lacks node.Feature, field string) error {
	total := len(v.Nodes)
	switch {
	case total == 0:
		return errdefs.New(errdefs.Unavailable, "", "no node has registered").
			WithHint("Start one: sandsea edge, or sandsea up on one machine").WithRetryAfter(time.Second)
	case whys[unreachable] == total:
		return errdefs.New(errdefs.Unavailable, "", "all %d nodes unreachable", total).
			WithHint("See sandsea up's log on the nodes").WithRetryAfter(time.Second)
	case whys[feature] == total:
		e := errdefs.New(errdefs.FailedPrecondition, "", "%s: no node enforces %s", field, lacks.Name).
			WithField(field, "").WithHint("See: sandsea doctor")
		if lacks.Fix != "" {
			e.Msg += " (" + lacks.Fix + ")"
		}
		e.Feature = lacks.Name
		return e
	case whys[memorySize] == total:
		most := largest(v, func(e node.Entry) int64 { return e.Capabilities.Memory })
		return tooLarge("memory", "limits.memory_bytes", Bytes(n.Memory), Bytes(most))
	case whys[cpuSize] == total:
		most := largest(v, func(e node.Entry) int64 { return e.Load.MaxCPUMillis })
		return tooLarge("cpu", "limits.cpu_millis", trim(float64(n.CPUMillis)/1000), trim(float64(most)/1000)+" to promise")
	case whys[pidsSize] == total:
		most := largest(v, func(e node.Entry) int64 { return e.Capabilities.PidMax })
		return tooLarge("pids", "limits.pids", strconv.FormatInt(n.Pids, 10), strconv.FormatInt(most, 10))
	}
	var parts []string
	for why := tried; why < reasons; why++ {
		if whys[why] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", whys[why], reasonText[why]))
		}
	}
	return errdefs.New(errdefs.Exhausted, "", "no node can take it: of %s, %s", plural(int64(total), "node"),
		strings.Join(parts, ", ")).WithHint("Try again in a second, or stop some: sandsea ls").WithRetryAfter(time.Second)
}

func tooLarge(what, field, want, have string) error {
	return errdefs.New(errdefs.Exhausted, "", "%s %s: largest node has %s", what, want, have).
		WithField(field, have).WithHint("Ask for less or add a node")
}

func largest(v node.View, size func(node.Entry) int64) int64 {
	var most int64
	for _, e := range v.Nodes {
		most = max(most, size(e))
	}
	return most
}

func plural(n int64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.FormatInt(n, 10) + " " + what + "s"
}

// Bytes writes a size for people, 1024-based: "512 MiB", "23.4 GiB".
func Bytes(n int64) string {
	v, unit := float64(n), 0
	for v >= 1024 && unit < len(units)-1 {
		v /= 1024
		unit++
	}
	return trim(v) + " " + units[unit]
}

var units = [...]string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}

func trim(v float64) string { return strings.TrimSuffix(strconv.FormatFloat(v, 'f', 1, 64), ".0") }
