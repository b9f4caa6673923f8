// Package keys is the one place that knows how keys in the store are spelled, who writes each and what its value is.
//
// Every value is JSON whose fields are only ever added. Project paths ("default/team/x") stand in keys as they are: an
// id or name that follows one is the last element, since neither holds a slash, and a project element never holds '='.
//
//	key                          writer       value
//	/nodes/<number>              edge         Node; under the node's lease
//	/node-data/<data id>         edge         what a data directory was given: number, epoch, boot, machine
//	/node-next                   edge         the next free node number, decimal
//	/sandboxes/<project>/<id>    API server   record of a create (package apiserver)
//	/keys/create/<project>=<key> API server   idempotency record of a create (package apiserver)
//	/ended/<project>/<id>        edge         sandboxpb.EncodeEnded; for lost ones the API server's sweep
//	/images/<name>               API server   image.Image and "created"
//	/imports/<id>                API server   an import that runs; under a lease
//	/iam/tokens/<token id>       iam          hash and rights of a token
//	/iam/bootstrap               iam          which token is the first-run admin's and whether its file was written
//	/endpoint-key                API server   the key of endpoint tokens, base64 (package apiserver)
package keys

import (
	"strconv"
	"strings"

	"github.com/sandsea/sandsea/internal/node"
)

// The prefixes, for Range and Watch.
const (
	Nodes      = "/nodes/"
	NodeData   = "/node-data/"
	NodeNext   = "/node-next"
	Sandboxes  = "/sandboxes/"
	CreateKeys = "/keys/create/"
	Ended      = "/ended/"
	Images     = "/images/"
	Imports    = "/imports/"
	IAM        = "/iam/"
	IAMTokens  = "/iam/tokens/"
	Bootstrap  = "/iam/bootstrap"
	Endpoint   = "/endpoint-key"
)

// Node is where a node registers itself. The number is written with leading zeros, so that keys sort by it.
func Node(n node.Number) string {
	s := strconv.FormatUint(uint64(n), 10)
	return Nodes + strings.Repeat("0", max(0, 7-len(s))) + s
}

// ParseNode gives the number in a key that Node made; plain decimals are accepted too.
func ParseNode(key string) (node.Number, bool) {
	rest, ok := strings.CutPrefix(key, Nodes)
	if !ok {
		return 0, false
	}
	n, err := strconv.ParseUint(rest, 10, 32)
	if err != nil || n == 0 || node.Number(n) > node.MaxNumber {
		return 0, false
	}
	return node.Number(n), true
}

// NodeDataID is what the data directory with that id was given.
func NodeDataID(dataID string) string { return NodeData + dataID }

// Sandbox is the record of a create.
func Sandbox(project, id string) string { return Sandboxes + project + "/" + id }

// ParseSandbox gives project and id of a key that Sandbox or EndedSandbox made.
func ParseSandbox(key string) (project, id string, ok bool) {
	rest, ok := strings.CutPrefix(key, Sandboxes)
	if !ok {
		rest, ok = strings.CutPrefix(key, Ended)
	}
	if !ok {
		return "", "", false
	}
	i := strings.LastIndexByte(rest, '/')
	if i <= 0 || i == len(rest)-1 {
		return "", "", false
	}
	return rest[:i], rest[i+1:], true
}

// CreateKey is the idempotency record of a create. The key may hold any bytes.
func CreateKey(project, key string) string { return CreateKeys + project + "=" + key }

// EndedSandbox is the record of an end.
func EndedSandbox(project, id string) string { return Ended + project + "/" + id }

// Image is a named image.
func Image(name string) string { return Images + name }

// Import is an import that runs.
func Import(id string) string { return Imports + id }

// Token is a token's record.
func Token(id string) string { return IAMTokens + id }
