package nodeclient

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/api/errwire"
	sandseav1 "github.com/sandsea/sandsea/api/sandsea/v1"
	"github.com/sandsea/sandsea/internal/sandboxpb"
)

const maxRefusal = 64 << 10

// Tunnel connects to a TCP port inside a sandbox. The header says who calls. The connection is the caller's to close;
// its end of writing is passed on by CloseWrite, where the line can say so.
func (c *Client) Tunnel(ctx context.Context, header http.Header, id string, port uint16) (io.ReadWriteCloser, error) {
	q := url.Values{"id": {id}, "port": {strconv.Itoa(int(port))}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base+sandboxpb.TunnelPath+"?"+q.Encode(), nil)
	if err != nil {
		return nil, fmt.Errorf("tunnel to sandbox %s: %w", id, err)
	}
	req.Header = header.Clone()
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", sandboxpb.TunnelProtocol)
	res, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	if res.StatusCode == http.StatusSwitchingProtocols {
		if line, ok := res.Body.(io.ReadWriteCloser); ok {
			return line, nil
		}
	}
	defer func() { _ = res.Body.Close() }()
	return nil, refusal(res)
}

// refusal is the error that a node answered in place of a tunnel, in the form of Connect's unary calls.
func refusal(res *http.Response) error {
	body, err := io.ReadAll(io.LimitReader(res.Body, maxRefusal))
	if err != nil {
		return errdefs.New(errdefs.Unavailable, "node", "the line broke").Wrap(err)
	}
	var m struct {
		Code    string `json:"code"`
		Message string `json:"message"`
		Details []struct {
			Type  string `json:"type"`
			Value string `json:"value"`
		} `json:"details"`
	}
	var code connect.Code
	if err := json.Unmarshal(body, &m); err != nil || code.UnmarshalText([]byte(m.Code)) != nil {
		return errdefs.New(errdefs.Internal, "node", "it answered a tunnel with status %d", res.StatusCode)
	}
	var detail sandseav1.ErrorDetail
	for _, d := range m.Details {
		raw, err := base64.RawStdEncoding.DecodeString(d.Value)
		if d.Type == string(detail.ProtoReflect().Descriptor().FullName()) && err == nil && proto.Unmarshal(raw, &detail) == nil {
			return errwire.FromDetail(&detail, m.Message)
		}
	}
	return errwire.FromConnect(connect.NewWireError(code, errors.New(m.Message)))
}
