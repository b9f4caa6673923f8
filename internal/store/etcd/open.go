package etcd

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/internal/cluster"
	"github.com/sandsea/sandsea/internal/store"
)

// Defaults of Config.
const (
	DefaultReadyTimeout = 60 * time.Second
	DefaultCallTimeout  = time.Second
	DefaultQuota        = 8 << 30
	// compaction keeps so much history: a watcher that is further behind lists again.
	compaction = "5m"
	maxOps     = 1024
	maxRequest = 8 << 20
)

// Progress tells how far an embedded store is with starting.
type Progress struct {
	Elapsed, Limit time.Duration
	// Percent of the log that is replayed, 0 while unknown.
	Percent int
}

// String is the words for people: "replaying its log, 41 %, limit 60 s".
func (p Progress) String() string {
	if p.Percent == 0 {
		return fmt.Sprintf("opening its log, limit %d s", int(p.Limit.Seconds()))
	}
	return fmt.Sprintf("replaying its log, %d %%, limit %d s", p.Percent, int(p.Limit.Seconds()))
}

// Config of an embedded store.
type Config struct {
	// Dir holds the member's data; made with mode 0700.
	Dir string
	// Log gets etcd's own messages, one level lower than etcd calls them; nil drops them.
	Log *slog.Logger
	// ReadyTimeout bounds the start; 0 means 60 s.
	ReadyTimeout time.Duration
	// CallTimeout bounds each call; 0 means 1 s.
	CallTimeout time.Duration
	// Quota is the size of the database at which writes are refused; 0 means 8 GiB.
	Quota int64
	// Upkeep is how often the database is looked at for room that can be given back; 0 means a minute.
	Upkeep time.Duration
	// Listener is where nodes of the cluster reach the store, with certificates on both ends and to their own records
	// alone; nil: nobody comes over the network. The Store closes it, also when Open fails.
	Listener net.Listener
	// Identity is the server's; needed with Listener.
	Identity *cluster.Identity
	// OnProgress, when set, is called once a second while the store starts.
	OnProgress func(Progress)
}

// Store is a store.Store on etcd.
type Store struct {
	cli    *clientv3.Client
	limit  time.Duration
	closed atomic.Bool
	// suspect is set by a write without an answer and cleared by the next answer.
	suspect atomic.Bool
	// member: it is the one member itself, in this process. What that has applied, all of its log when Open returns, is
	// the latest that anybody was told, so a transaction that only reads asks nobody else.
	member bool
	// ready waits until a connection stands; nil for an embedded member.
	ready func(context.Context) error
	stop  func()
	// address is where nodes reach an embedded member; empty: nowhere.
	address string
}

var _ store.Store = (*Store)(nil)

// Open starts a single embedded member on cfg.Dir and returns when it answers. Damaged files are errdefs.DataLoss.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	served := false
	defer func() {
		if cfg.Listener != nil && !served {
			_ = cfg.Listener.Close()
		}
	}()
	limit := cmp.Or(cfg.ReadyTimeout, DefaultReadyTimeout)
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, errdefs.New(errdefs.FailedPrecondition, cfg.Dir, "cannot be made: %v", err).
			WithHint("Choose another: --data DIR").Wrap(err)
	}
	ec := embed.NewConfig()
	ec.Name, ec.Dir = "sandsea", cfg.Dir
	// The addresses are names in the membership only. etcd itself listens nowhere: it would answer HTTP beside the calls.
	self := url.URL{Scheme: "http", Host: "localhost:2380"}
	ec.ListenPeerUrls, ec.ListenClientUrls, ec.ListenClientHttpUrls = nil, nil, nil
	ec.AdvertisePeerUrls, ec.AdvertiseClientUrls = []url.URL{self}, []url.URL{{Scheme: "http", Host: "localhost:2379"}}
	ec.InitialCluster = ec.Name + "=" + self.String()
	// One member elects itself, so short ticks only make the start and short leases quicker.
	ec.TickMs, ec.ElectionMs = 50, 500
	ec.AutoCompactionMode, ec.AutoCompactionRetention = embed.CompactorModePeriodic, compaction
	ec.QuotaBackendBytes = cmp.Or(cfg.Quota, DefaultQuota)
	ec.MaxTxnOps, ec.MaxRequestBytes = maxOps, maxRequest
	ec.EnableGRPCGateway = false
	ec.WatchProgressNotifyInterval = 10 * time.Second
	last := newLastWord()
	ec.ZapLoggerBuilder = embed.NewZapLoggerBuilder(
		zapTo(cfg.Log).WithOptions(zap.WithFatalHook(last), zap.WithPanicHook(last)))

	began := time.Now()
	type started struct {
		e   *embed.Etcd
		err error
	}
	up := make(chan started, 1)
	go func() {
		e, err := start(ctx, ec, last)
		up <- started{e, err}
	}()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	late := time.NewTimer(limit)
	defer late.Stop()
	var e *embed.Etcd
	var ready <-chan struct{}
	// abandon closes a member whose start goes on without us.
	abandon := func() {
		if e != nil {
			e.Close()
			return
		}
		go func() {
			if s := <-up; s.e != nil {
				s.e.Close()
			}
		}()
	}
	for {
		select {
		case s := <-up:
			if s.err != nil {
				return nil, s.err
			}
			e, ready = s.e, s.e.Server.ReadyNotify()
		case word := <-last.words: // whatever runs of the member ends with the process
			return nil, fallen(cfg.Dir, word)
		case <-ready:
			last.over()
			st := newStore(v3client.New(e.Server), cmp.Or(cfg.CallTimeout, DefaultCallTimeout))
			st.member = true
			st.keepRoom(ctx, e, ec.QuotaBackendBytes, cmp.Or(cfg.Upkeep, upkeepEvery), cfg.Log)
			if cfg.Listener != nil {
				served = true
				st.serveNodes(cfg.Listener, e, cfg.Identity, cfg.Log)
			}
			return st, nil
		case <-tick.C:
			if cfg.OnProgress != nil {
				cfg.OnProgress(Progress{Elapsed: time.Since(began), Limit: limit, Percent: percent(e)})
			}
		case <-late.C:
			abandon()
			return nil, errdefs.New(errdefs.Unavailable, "store "+cfg.Dir, "not ready in %s", limit).
				WithHint("Start again with a faster disk or a longer limit")
		case <-ctx.Done():
			abandon()
			return nil, errdefs.New(errdefs.Canceled, "store "+cfg.Dir, "start interrupted").Wrap(context.Cause(ctx))
		}
	}
}

func percent(e *embed.Etcd) int {
	if e == nil || e.Server == nil {
		return 0
	}
	all := e.Server.CommittedIndex()
	if all == 0 {
		return 0
	}
	return int(min(100, e.Server.AppliedIndex()*100/all))
}

// Address is where nodes reach an embedded store that listens, as it was bound: HOST:PORT.
func (s *Store) Address() string { return s.address }

// Dial connects to a cluster, by TLS when line says how. It returns at once; calls are Unavailable while no member
// answers.
func Dial(ctx context.Context, endpoints []string, line *tls.Config, log *slog.Logger) (*Store, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	options := []grpc.DialOption{grpc.WithKeepaliveParams(keepalive.ClientParameters{
		Time: 10 * time.Second, Timeout: 2 * time.Second, PermitWithoutStream: true,
	})}
	why := &reason{}
	// A dialer of our own: gRPC's would go through the proxy of the environment, which is for imports.
	options = append(options, grpc.WithContextDialer(why.dial))
	if line != nil {
		options = append(options, grpc.WithTransportCredentials(named{credentials.NewTLS(line), line.ServerName, why}))
	}
	cli, err := clientv3.New(clientv3.Config{
		Endpoints: endpoints, Logger: zapTo(log), DialTimeout: DefaultCallTimeout,
		DialKeepAliveTime: 3 * time.Second, DialKeepAliveTimeout: 2 * time.Second, PermitWithoutStream: true,
		MaxCallSendMsgSize: maxRequest, DialOptions: options,
	})
	if err != nil {
		return nil, errdefs.New(errdefs.Invalid, "store", "%v", err).WithField("store.endpoints", "").Wrap(err)
	}
	st := newStore(cli, DefaultCallTimeout)
	conn := cli.ActiveConnection()
	st.ready = func(ctx context.Context) error {
		for {
			state := conn.GetState()
			if state == connectivity.Ready {
				return nil
			}
			if state == connectivity.Idle {
				conn.Connect()
			}
			if !conn.WaitForStateChange(ctx, state) {
				return why.unavailable(ctx.Err())
			}
		}
	}
	return st, nil
}

// named expects one name in the certificate, whatever address was dialled: etcd's client would expect the address.
type named struct {
	credentials.TransportCredentials
	name string
	why  *reason
}

func (n named) ClientHandshake(ctx context.Context, _ string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, info, err := n.TransportCredentials.ClientHandshake(ctx, n.name, raw)
	n.why.note(err)
	if err != nil {
		return nil, nil, err
	}
	return told{c, n.why}, info, nil
}

func (n named) Clone() credentials.TransportCredentials {
	return named{n.TransportCredentials.Clone(), n.name, n.why}
}

// reason is why a connection did not come about or ended, the latest; for who asks why nobody answers.
type reason struct{ last atomic.Pointer[error] }

func (r *reason) note(err error) {
	if err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, context.Canceled) {
		r.last.Store(&err)
	}
}

func (r *reason) dial(ctx context.Context, address string) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	r.note(err)
	return c, err
}

func (r *reason) unavailable(err error) error {
	if last := r.last.Load(); last != nil {
		return unavailable("no member answers: %v", *last).Wrap(*last)
	}
	return unavailable("no member answers").Wrap(err)
}

// told hears what the other end thinks of our certificate: in TLS 1.3 that comes after the handshake, at the first read.
type told struct {
	net.Conn
	why *reason
}

func (t told) Read(p []byte) (int, error) {
	n, err := t.Conn.Read(p)
	if !errors.Is(err, io.EOF) {
		t.why.note(err)
	}
	return n, err
}

func newStore(cli *clientv3.Client, limit time.Duration) *Store {
	return &Store{cli: cli, limit: limit, stop: func() {}}
}

// Close ends all watches and stops an embedded member. Calls after it are Unavailable.
func (s *Store) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	var err error
	if c, ok := any(s.cli).(io.Closer); ok {
		err = c.Close()
	}
	s.stop()
	if err != nil && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("close store: %w", err)
	}
	return nil
}
