package runner

import (
	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/chronus/shells"
	"github.com/sandsea/sandsea/internal/edge/journal"
	"github.com/sandsea/sandsea/internal/sandbox"
)

// shellMemory is the journal as a Set of shell sessions sees it.
type shellMemory struct{ b *box }

func (m shellMemory) Save(name string, data []byte) error {
	return m.b.r.cfg.Journal.Put(journal.Record{Key: journal.Key{Kind: kindShell, Name: name}, Data: data})
}

func (m shellMemory) Forget(names ...string) error {
	return m.b.r.cfg.Journal.Delete(shellKeys(names)...)
}

func shellKeys(names []string) []journal.Key {
	keys := make([]journal.Key, 0, len(names))
	for _, n := range names {
		keys = append(keys, journal.Key{Kind: kindShell, Name: n})
	}
	return keys
}

// newShells makes the shell sessions of the sandbox.
func (b *box) newShells(rec entry) *shells.Set {
	set := shells.New(shells.Config{
		ID: string(b.id), User: firstOf(rec.Spec.User, rec.Config.User), Memory: shellMemory{b}, Now: b.r.cfg.Now,
		Log: b.r.cfg.Log,
	})
	b.mu.Lock()
	defer b.mu.Unlock()
	b.shells = set
	return set
}

// shellRecords are the sessions of the journal, by sandbox.
func (r *Runner) shellRecords() (map[sandbox.ID]map[string][]byte, error) {
	out := map[sandbox.ID]map[string][]byte{}
	for rec, err := range r.cfg.Journal.All(kindShell) {
		if err != nil {
			return nil, err
		}
		id, ok := processOwner(rec.Key.Name)
		if !ok {
			return nil, errdefs.New(errdefs.DataLoss, "journal", "a shell session's record is named %q", rec.Key.Name)
		}
		if out[id] == nil {
			out[id] = map[string][]byte{}
		}
		out[id][rec.Key.Name] = rec.Data
	}
	return out, nil
}
