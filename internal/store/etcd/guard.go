package etcd

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3rpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/sandsea/sandsea/internal/cluster"
	"github.com/sandsea/sandsea/internal/node"
	"github.com/sandsea/sandsea/internal/store/keys"
)

// The guard stands before the store for whoever comes over the network: nodes, and only to the records that a node has
// to do with. What is not named here is refused: above all tokens, images, creates, and every call that sees the whole
// store.

// What a node may read, and write. A prefix ends in a slash.
var (
	readable = []string{keys.Nodes, keys.NodeData, keys.NodeNext}
	writable = []string{keys.Nodes, keys.NodeData, keys.NodeNext, keys.Ended}
)

// pingLeast is how often a node's client may ask whether the line still stands; Dial asks every 3 to 10 s.
const pingLeast = 2 * time.Second

// serveNodes answers nodes on ln until the store is closed.
func (s *Store) serveNodes(ln net.Listener, e *embed.Etcd, id *cluster.Identity, log *slog.Logger) {
	s.address = ln.Addr().String()
	srv := v3rpc.Server(e.Server, id.Accept(), nil, guards()...)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := srv.Serve(ln); err != nil && log != nil {
			log.Error("serve the store to nodes", "err", err)
		}
	})
	stop := s.stop
	s.stop = func() {
		srv.Stop()
		wg.Wait()
		stop()
	}
}

func guards() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: pingLeast, PermitWithoutStream: true}),
		grpc.ChainUnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
			if err := judge(ctx, req); err != nil {
				return nil, err
			}
			return next(ctx, req)
		}),
		grpc.ChainStreamInterceptor(func(srv any, st grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
			return next(srv, &guarded{st})
		}),
	}
}

// guarded judges each message of a stream.
type guarded struct{ grpc.ServerStream }

func (g *guarded) RecvMsg(m any) error {
	if err := g.ServerStream.RecvMsg(m); err != nil {
		return err
	}
	return judge(g.Context(), m)
}

func judge(ctx context.Context, req any) error {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return denied("a caller without an address")
	}
	line, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok {
		return denied("a caller without TLS")
	}
	who, err := cluster.PeerOf(&line.State)
	if err != nil || who.Role != cluster.Node {
		return denied("a caller that is no node")
	}
	return mayNode(who.Name, req)
}

func denied(what string) error {
	return status.Error(codes.PermissionDenied, "the store is not open to "+what)
}

// mayNode judges a request of the node of that name.
func mayNode(name string, req any) error {
	switch r := req.(type) {
	case *pb.RangeRequest:
		return within(readable, r.GetKey(), r.GetRangeEnd())
	case *pb.PutRequest:
		return mayPut(name, r)
	case *pb.TxnRequest:
		return mayTxn(name, r)
	case *pb.LeaseGrantRequest, *pb.LeaseRevokeRequest, *pb.LeaseKeepAliveRequest:
		return nil
	case *pb.WatchRequest:
		if c := r.GetCreateRequest(); c != nil {
			return within(readable, c.GetKey(), c.GetRangeEnd())
		}
		return nil
	}
	return denied("a node for this")
}

func mayTxn(name string, r *pb.TxnRequest) error {
	for _, c := range r.GetCompare() {
		if err := within(readable, c.GetKey(), c.GetRangeEnd()); err != nil {
			return err
		}
	}
	for _, list := range [][]*pb.RequestOp{r.GetSuccess(), r.GetFailure()} {
		for _, op := range list {
			var err error
			switch o := op.GetRequest().(type) {
			case *pb.RequestOp_RequestRange:
				err = mayNode(name, o.RequestRange)
			case *pb.RequestOp_RequestPut:
				err = mayPut(name, o.RequestPut)
			default:
				err = denied("a node for this")
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// mayPut lets a node register under its own name only, so that nobody is sent to a node that is not the one they mean, and
// at an address of the network: one of a socket would lead the server to whoever listens on its own machine, unnamed.
func mayPut(name string, r *pb.PutRequest) error {
	if err := within(writable, r.GetKey(), nil); err != nil {
		return err
	}
	if r.GetPrevKv() {
		return within(readable, r.GetKey(), nil)
	}
	if !strings.HasPrefix(string(r.GetKey()), keys.Nodes) {
		return nil
	}
	var reg node.Registration
	if json.Unmarshal(r.GetValue(), &reg) != nil || reg.Name != name || string(r.GetKey()) != keys.Node(reg.Number) {
		return denied("a node in another's name")
	}
	if _, _, err := net.SplitHostPort(reg.Address); err != nil || strings.Contains(reg.Address, "/") {
		return denied("a node at no address of the network")
	}
	return nil
}

// within reports whether a key, or every key from it up to end, is of one of these. etcd's end "\x00" is no end at all.
func within(allowed []string, key, end []byte) error {
	for _, p := range allowed {
		if !strings.HasSuffix(p, "/") {
			if string(key) == p && len(end) == 0 {
				return nil
			}
			continue
		}
		behind := p[:len(p)-1] + "0" // '0' follows '/'
		if strings.HasPrefix(string(key), p) && (len(end) == 0 || string(end) > string(key) && string(end) <= behind) {
			return nil
		}
	}
	return denied("a node for this record")
}
