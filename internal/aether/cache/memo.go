package cache

import (
	"container/list"
	"context"
	"io"
	"sync"
)

// Memo remembers what was parsed out of objects, by the bytes' digest, so that a list that many sandboxes ask for is
// parsed once. What it returns is shared: do not change it.
type Memo[T any] struct {
	max   int64
	turns chan struct{} // one for each value that is being made

	mu    sync.Mutex
	used  int64                    // guarded by mu
	items map[string]*list.Element // of *memo[T]; guarded by mu
	lru   *list.List               // guarded by mu
}

type memo[T any] struct {
	key   string
	size  int64
	once  sync.Once
	value T
	err   error
}

// madeAtOnce is how many values of a Memo are made at a time. Each may take many times its bytes, and who asks for many
// large ones at once would have more than there is.
const madeAtOnce = 2

// NewMemo makes a Memo of at most maxBytes of objects; what was parsed out of them takes a small multiple of it.
func NewMemo[T any](maxBytes int64) *Memo[T] {
	return &Memo[T]{max: maxBytes, turns: make(chan struct{}, madeAtOnce), items: map[string]*list.Element{}, lru: list.New()}
}

// Of returns parse of the object's bytes. The same bytes under another key are parsed again: parse may use the key.
func (m *Memo[T]) Of(ctx context.Context, o *Object, parse func(b []byte, meta Meta) (T, error)) (T, error) {
	return m.Read(ctx, o, func(r io.Reader, meta Meta) (T, error) {
		b := make([]byte, meta.Size)
		if _, err := io.ReadFull(r, b); err != nil {
			var zero T
			return zero, err
		}
		return parse(b, meta)
	})
}

// Read is Of for an object that is better parsed as a stream.
func (m *Memo[T]) Read(ctx context.Context, o *Object, parse func(r io.Reader, meta Meta) (T, error)) (T, error) {
	var zero T
	meta, err := o.Wait(ctx)
	if err != nil {
		return zero, err
	}
	return m.Make(meta.Key+"\x00"+meta.URL+"\x00"+meta.Digests["sha256"], meta.Size, func() (T, error) {
		// Others wait for this too, and the bytes are here: no caller who leaves ends it.
		return parse(o.Reader(context.WithoutCancel(ctx)), meta)
	})
}

// Make is for what is made of more than one object: f is called unless the value of key, which says all that f depends
// on, is remembered. size counts against the bound. f waits for nothing that comes from upstream.
func (m *Memo[T]) Make(key string, size int64, f func() (T, error)) (T, error) {
	var zero T
	m.mu.Lock()
	at := m.items[key]
	if at == nil {
		at = m.lru.PushFront(&memo[T]{key: key, size: size})
		m.items[key] = at
		m.used += size
		for m.used > m.max && m.lru.Len() > 1 {
			old := m.lru.Remove(m.lru.Back()).(*memo[T])
			delete(m.items, old.key)
			m.used -= old.size
		}
	}
	m.lru.MoveToFront(at)
	item := at.Value.(*memo[T])
	m.mu.Unlock()
	item.once.Do(func() {
		m.turns <- struct{}{}
		defer func() { <-m.turns }()
		item.value, item.err = f()
	})
	if item.err != nil {
		m.forget(key, at)
		return zero, item.err
	}
	return item.value, nil
}

func (m *Memo[T]) forget(key string, at *list.Element) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.items[key] == at {
		m.used -= m.lru.Remove(at).(*memo[T]).size
		delete(m.items, key)
	}
}
