package nodeapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/edge/runner"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/sandboxpb"
	"github.com/sandsea/sandsea/internal/store"
	"github.com/sandsea/sandsea/internal/store/keys"
)

const (
	// LeaseTTL is how long a node that is silent stays registered.
	LeaseTTL = 10 * time.Second

	identifyTries = 16
	nodeFile      = "node.json"
	revokeLimit   = 2 * time.Second
)

// Machine says which machine this is and where it answers.
type Machine struct {
	Name    string // for people; empty: n and the number
	Address string // "unix:/path" or "host:port"
	DataID  string // of the data directory
	Boot    string // the kernel's boot id
	Machine string // the machine's id
}

// Identity is what the store gave this node.
type Identity struct {
	Number node.Number `json:"number"`
	Epoch  int64       `json:"epoch"`
	Name   string      `json:"name"`
}

// given is the record of what a data directory was given, and the file in that directory.
type given struct {
	Number  node.Number `json:"number"`
	Epoch   int64       `json:"epoch"`
	Boot    string      `json:"boot"`
	Machine string      `json:"machine"`
	DataID  string      `json:"data_id,omitempty"`
}

// Identify asks the store for this node's number, once in the life of a data directory, and for its epoch, which rises
// when the node's sandboxes cannot have survived: another boot or another machine. dir keeps the answer in node.json,
// so that ids stay true even when the store starts anew.
func Identify(ctx context.Context, s store.Store, dir string, m Machine) (Identity, error) {
	saved, err := readGiven(filepath.Join(dir, nodeFile), m.DataID)
	if err != nil {
		return Identity{}, err
	}
	if err := nameIsFree(ctx, s, m); err != nil {
		return Identity{}, err
	}
	for range identifyTries {
		g, ok, err := identify(ctx, s, m, saved)
		if err != nil {
			return Identity{}, fmt.Errorf("ask for the number of this node: %w", err)
		}
		if !ok {
			continue // another node asked at the same time
		}
		if err := writeGiven(filepath.Join(dir, nodeFile), g); err != nil {
			return Identity{}, err
		}
		id := Identity{Number: g.Number, Epoch: g.Epoch, Name: m.Name}
		if id.Name == "" {
			id.Name = fmt.Sprintf("n%d", g.Number)
		}
		return id, nil
	}
	return Identity{}, errdefs.New(errdefs.Unavailable, "node", "others keep asking for numbers at the same time")
}

// nameIsFree refuses the name of another node that is there.
func nameIsFree(ctx context.Context, s store.Store, m Machine) error {
	if m.Name == "" {
		return nil
	}
	var holder node.Registration
	_, err := store.All(ctx, s, keys.Nodes, func(p store.Pair) {
		var r node.Registration
		if json.Unmarshal(p.Value, &r) == nil && r.Name == m.Name && r.DataID != m.DataID {
			holder = r
		}
	})
	if err != nil {
		return fmt.Errorf("ask who has the name of this node: %w", err)
	}
	if holder.Number == 0 {
		return nil
	}
	return errdefs.New(errdefs.AlreadyExists, "node "+m.Name, "runs at %s, with another data directory", holder.Address).
		WithHint("One invitation is one node. Make another: sandsea node invite NAME")
}

func identify(ctx context.Context, s store.Store, m Machine, saved given) (g given, ok bool, err error) {
	key := keys.NodeDataID(m.DataID)
	res, err := s.Txn(ctx, nil, []store.Op{store.Get(key), store.Get(keys.NodeNext)}, nil)
	if err != nil {
		return g, false, err
	}
	pairs := map[string]store.Pair{}
	for _, p := range res.Pairs {
		pairs[p.Key] = p
	}
	cond := store.Cond{Key: key, Absent: true}
	var ops []store.Op
	var conds []store.Cond
	if p, known := pairs[key]; known {
		if err := json.Unmarshal(p.Value, &g); err != nil || g.Number == 0 {
			return g, false, errdefs.New(errdefs.DataLoss, "store key "+key, "is no record of a node")
		}
		if g.Boot == m.Boot && g.Machine == m.Machine {
			return g, true, nil
		}
		g.Epoch++
		cond = store.Cond{Key: key, ModRev: p.ModRev}
	} else {
		var op store.Op
		var next store.Cond
		free, err := isFree(ctx, s, saved.Number)
		if err != nil {
			return g, false, err
		}
		if g, op, next, err = allocate(pairs[keys.NodeNext], saved, free); err != nil {
			return g, false, err
		}
		ops, conds = append(ops, op), append(conds, next)
	}
	g.Boot, g.Machine, g.DataID = m.Boot, m.Machine, m.DataID
	value, err := json.Marshal(g)
	if err != nil {
		return g, false, err
	}
	res, err = s.Txn(ctx, append(conds, cond), append(ops, store.Put(key, value)), nil)
	return g, res.Succeeded, err
}

// isFree reports whether no data directory has the number in this store.
func isFree(ctx context.Context, s store.Store, n node.Number) (bool, error) {
	free := true
	_, err := store.All(ctx, s, keys.NodeData, func(p store.Pair) {
		var g given
		free = free && json.Unmarshal(p.Value, &g) == nil && g.Number != n
	})
	return free, err
}

// allocate takes the next free number, or the one that the data directory had from an earlier store when it is free in
// this one: nodes come back to a new store in any order.
func allocate(next store.Pair, saved given, free bool) (g given, op store.Op, cond store.Cond, err error) {
	n := uint64(1)
	cond = store.Cond{Key: keys.NodeNext, Absent: true}
	if next.Key != "" {
		if n, err = strconv.ParseUint(string(next.Value), 10, 32); err != nil || n == 0 {
			return g, op, cond, errdefs.New(errdefs.DataLoss, "store key "+keys.NodeNext, "is no number")
		}
		cond = store.Cond{Key: keys.NodeNext, ModRev: next.ModRev}
	}
	g = given{Number: node.Number(n), Epoch: 1}
	if saved.Number != 0 {
		if !free {
			return g, op, cond, errdefs.New(errdefs.FailedPrecondition, "node",
				"its data directory says number %d, which the store has given to another", saved.Number).
				WithHint("Bring the store's data back, or start with an empty data directory")
		}
		g = given{Number: saved.Number, Epoch: saved.Epoch + 1}
	}
	if g.Number > node.MaxNumber {
		return g, op, cond, errdefs.New(errdefs.Exhausted, "node", "all %d numbers are given", node.MaxNumber)
	}
	return g, store.Put(keys.NodeNext, []byte(strconv.FormatUint(max(n, uint64(g.Number)+1), 10))), cond, nil
}

func readGiven(path, dataID string) (g given, err error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return g, nil
	}
	if err != nil {
		return g, fmt.Errorf("read the node's number: %w", err)
	}
	if err := json.Unmarshal(b, &g); err != nil {
		return g, errdefs.New(errdefs.DataLoss, path, "is no record of a node").Wrap(err)
	}
	if g.DataID != dataID {
		return g, errdefs.New(errdefs.FailedPrecondition, path, "belongs to the data directory %q, not %q", g.DataID, dataID).
			WithHint("Data directories cannot be copied. Start with an empty one")
	}
	return g, nil
}

func writeGiven(path string, g given) error {
	b, err := json.MarshalIndent(g, "", "  ")
	if err != nil {
		return err
	}
	tmp := path + ".new"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("keep the node's number: %w", err)
	}
	_, err = f.Write(append(b, '\n'))
	if err := errors.Join(err, f.Sync(), f.Close(), os.Rename(tmp, path)); err != nil {
		return fmt.Errorf("keep the node's number: %w", err)
	}
	return nil
}

// Register keeps the node registered until ctx ends, and then takes the registration back. ready is called after the
// first success. A store that is away is asked again; it returns early only when this is the node no more: its epoch in
// the store has been raised, so that its sandboxes are given up, or the store knows nothing of it.
func Register(ctx context.Context, s store.Store, m Machine, id Identity, log *slog.Logger, ready func()) error {
	wait := 100 * time.Millisecond
	for {
		err := register(ctx, s, m, id, func() {
			wait = 100 * time.Millisecond
			if ready != nil {
				ready()
				ready = nil
			}
		})
		select {
		case <-ctx.Done():
			return nil
		default:
		}
		if errors.Is(err, errdefs.FailedPrecondition) {
			return err
		}
		log.Warn("registration of the node lost, trying again", "node", id.Name, "err", err)
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil
		}
		wait = min(2*wait, 5*time.Second)
	}
}

func register(ctx context.Context, s store.Store, m Machine, id Identity, done func()) error {
	key := keys.NodeDataID(m.DataID)
	res, err := s.Txn(ctx, nil, []store.Op{store.Get(key)}, nil)
	if err != nil {
		return err
	}
	if len(res.Pairs) == 0 {
		return errdefs.New(errdefs.FailedPrecondition, "node "+id.Name, "is not in the store any more: that has begun anew, or is an older one").
			WithHint("Start it again")
	}
	var g given
	if err := json.Unmarshal(res.Pairs[0].Value, &g); err != nil {
		return fmt.Errorf("read the record of this node: %w", err)
	}
	if g.Epoch != id.Epoch || g.Number != id.Number {
		return errdefs.New(errdefs.FailedPrecondition, "node "+id.Name, "was fenced: the store says number %d and epoch %d",
			g.Number, g.Epoch).
			WithHint("Start it again")
	}
	// Another may have come while this node was cut off.
	if err := nameIsFree(ctx, s, m); err != nil {
		return err
	}
	value, err := json.Marshal(node.Registration{
		Number: id.Number, Name: id.Name, Address: m.Address, Epoch: id.Epoch, Boot: m.Boot, Machine: m.Machine,
		DataID: m.DataID,
	})
	if err != nil {
		return err
	}
	lease, err := s.Lease(ctx, LeaseTTL)
	if err != nil {
		return err
	}
	defer func() {
		rctx, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), revokeLimit, errdefs.Deadline)
		defer stop()
		_ = lease.Revoke(rctx) // else it lapses
	}()
	put := store.Put(keys.Node(id.Number), value)
	put.Lease = lease.ID()
	// The epoch may have been raised since it was read.
	res, err = s.Txn(ctx, []store.Cond{{Key: key, ModRev: res.Pairs[0].ModRev}}, []store.Op{put}, nil)
	if err != nil {
		return err
	}
	if !res.Succeeded {
		return errdefs.New(errdefs.Unavailable, "node "+id.Name, "its record changed meanwhile")
	}
	done()
	return lease.KeepAlive(ctx)
}

// recordMost is how much EndedRecorder puts into one transaction, well below what the store takes.
const recordMost = 2 << 20

// EndedRecorder writes ends of sandboxes to the store, for runner.Config.Record. Told again after an error, those that
// the store has change nothing.
func EndedRecorder(s store.Store, name string) func(context.Context, []runner.Snapshot) error {
	return func(ctx context.Context, ended []runner.Snapshot) error {
		ops, size := make([]store.Op, 0, len(ended)), 0
		for _, x := range ended {
			m := Sandbox(x)
			m.Node = name
			value, err := sandboxpb.EncodeEnded(m)
			if err != nil {
				return fmt.Errorf("encode the end of sandbox %s: %w", x.ID.Short(), err)
			}
			if size += len(value); size > recordMost && len(ops) > 0 {
				if _, err := s.Txn(ctx, nil, ops, nil); err != nil {
					return err
				}
				ops, size = nil, len(value)
			}
			ops = append(ops, store.Put(keys.EndedSandbox(x.Project, string(x.ID)), value))
		}
		_, err := s.Txn(ctx, nil, ops, nil)
		return err
	}
}
