package apiserver

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strconv"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sandsea/sandsea/api/errdefs"
	nodev1 "github.com/sandsea/sandsea/api/node/v1"
	pb "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/sandbox"
	"github.com/sandsea/sandsea/internal/sandboxpb"
)

// Endpoint gives the address of a port, on the address that the caller used for this call.
func (n networks) Endpoint(ctx context.Context, r request[pb.EndpointRequest]) (response[pb.EndpointResponse], error) {
	port, ttl := r.Msg.GetPort(), r.Msg.GetTtlMs()
	// First whether there is one for the caller: what else is wrong is nobody else's business.
	sb, err := n.s.living(ctx, r.Msg.GetId())
	if err != nil {
		return nil, err
	}
	switch {
	case port < 1 || port > 65535:
		return nil, errdefs.New(errdefs.Invalid, "", "port: %d is not between 1 and 65535", port).WithField("port", "65535").
			WithHint("Give the port on which the server inside listens")
	case ttl < 0 || ttl > sandbox.MaxTTL.Milliseconds():
		return nil, errdefs.New(errdefs.Invalid, "", "ttl_ms: %d is not between 0 and %d", ttl, sandbox.MaxTTL.Milliseconds()).
			WithField("ttl_ms", strconv.FormatInt(sandbox.MaxTTL.Milliseconds(), 10)).WithHint("0 takes the rest of the sandbox's life")
	}
	key, err := n.s.endpoints.key.get(ctx)
	if err != nil {
		return nil, err
	}
	at := place{sandbox.ID(sb.GetId()), uint16(port)}
	var end time.Time // none: a sandbox's end may still be moved
	expires := sb.GetExpiresAt()
	if ttl > 0 {
		end = time.Now().Add(time.Duration(ttl) * time.Millisecond)
		if expires == nil || end.Before(expires.AsTime()) {
			expires = timestamppb.New(end)
		}
	}
	token := mintEndpoint(key, at, sb.GetProject(), end)
	address := addressOf(ctx) + at.path()
	return connect.NewResponse(&pb.EndpointResponse{
		Url: address, Headers: map[string]string{EndpointHeader: token},
		BrowserUrl: address + "?" + endpointParameter + "=" + token, ExpiresAt: expires,
	}), nil
}

// living asks the node for a sandbox that has not ended.
func (s *Server) living(ctx context.Context, id string) (*pb.Sandbox, error) {
	l, err := s.route(ctx, id)
	if err != nil {
		return nil, err
	}
	req := connect.NewRequest(&nodev1.GetRequest{Id: id})
	speak(req.Header(), caller(ctx))
	resp, err := l.Edge.Get(ctx, req)
	if err != nil {
		return nil, s.buried(ctx, l, s.answer(ctx, l, err, reads))
	}
	if sb := resp.Msg.GetSandbox(); !sandboxpb.Over(sb.GetState()) {
		return sb, nil
	}
	return nil, gone(resp.Msg.GetSandbox())
}

// buried is the error for a sandbox that its node does not know: how it ended, if anybody remembers.
func (s *Server) buried(ctx context.Context, l line, cause error) error {
	if errdefs.KindOf(cause) != errdefs.NotFound {
		return cause
	}
	sb, err := s.afterlife(ctx, l, cause)
	if err != nil {
		return err
	}
	return gone(sb)
}

// addressFrom is the address of ours that a request was sent to, as "http://127.0.0.1:7070".
func addressFrom(r *http.Request) string {
	host := r.Host
	if host == "" { // HTTP/1.0
		if a, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
			host = a.String()
		}
	}
	if r.TLS != nil {
		return "https://" + host
	}
	return "http://" + host
}

func addressOf(ctx context.Context) string {
	a, _ := ctx.Value(addressKey).(string)
	return a
}

// silent reports whether an error says that nobody listens at the port.
func silent(err error) bool {
	e, ok := errors.AsType[*errdefs.Error](err)
	return ok && e.Kind == errdefs.Unavailable && e.Field == "port"
}
