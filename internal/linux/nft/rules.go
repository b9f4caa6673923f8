package nft

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Ids of the sets tell them apart within one transaction; afterwards names do.
const (
	namedID = 1 + iota
	classesID
	shardsID
	directID // and following
)

var table = &nftables.Table{Name: tableName, Family: nftables.TableFamilyINet}

// The sets of the table.
var (
	named = &nftables.Set{
		Table: table, ID: namedID, Name: "named", KeyType: nftables.TypeIPAddr, KeyByteOrder: binaryutil.BigEndian,
	}
	classes = &nftables.Set{
		Table: table, ID: classesID, Name: "classes", KeyType: nftables.TypeIPAddr, KeyByteOrder: binaryutil.BigEndian,
		IsMap: true, DataType: nftables.TypeMark,
	}
	shardOf = &nftables.Set{
		Table: table, ID: shardsID, Name: "shards", KeyType: nftables.TypeMark, KeyByteOrder: binaryutil.BigEndian,
		IsMap: true, DataType: nftables.TypeVerdict,
	}
	direct = func() (all [shards]*nftables.Set) {
		for i := range all {
			all[i] = &nftables.Set{
				Table: table, ID: directID + uint32(i), Name: shardName(i), Interval: true, Concatenation: true,
				KeyType: nftables.MustConcatSetType(
					nftables.TypeMark, nftables.TypeIPAddr, nftables.TypeInetProto, nftables.TypeInetService),
			}
		}
		return all
	}()
)

// shardName is that of a shard's set, and of its chain.
func shardName(i int) string { return "direct" + strconv.Itoa(i) }

// shard is the set that holds a class.
func shard(class uint32) *nftables.Set { return direct[class%shards] }

// jumps are the elements of shardOf.
func jumps() []nftables.SetElement {
	out := make([]nftables.SetElement, shards)
	for i := range out {
		out[i] = nftables.SetElement{
			Key:         binary.BigEndian.AppendUint32(nil, uint32(i)),
			VerdictData: &expr.Verdict{Kind: expr.VerdictJump, Chain: shardName(i)},
		}
	}
	return out
}

// keyLen is the length of an element's key in direct: each part is padded to four bytes.
const keyLen = 16

func encode(class uint32, boxes []Opening) []nftables.SetElement {
	out := make([]nftables.SetElement, 0, len(boxes))
	for _, b := range boxes {
		end := func(a netip.Addr, port uint16) []byte {
			k := binary.BigEndian.AppendUint32(make([]byte, 0, keyLen), class)
			k = append(append(k, a.AsSlice()...), b.Protocol, 0, 0, 0)
			return append(binary.BigEndian.AppendUint16(k, port), 0, 0)
		}
		out = append(out, nftables.SetElement{Key: end(b.From, b.First), KeyEnd: end(b.To, b.Last)})
	}
	return out
}

func decode(e nftables.SetElement) (class uint32, b Opening, ok bool) {
	if len(e.Key) != keyLen || len(e.KeyEnd) != keyLen {
		return 0, b, false
	}
	address := func(k []byte) netip.Addr { return netip.AddrFrom4([4]byte(k[4:8])) }
	return binary.BigEndian.Uint32(e.Key), Opening{
		From: address(e.Key), To: address(e.KeyEnd), Protocol: e.Key[8],
		First: binary.BigEndian.Uint16(e.Key[12:]), Last: binary.BigEndian.Uint16(e.KeyEnd[12:]),
	}, true
}

func member(source netip.Addr, class uint32) nftables.SetElement {
	return nftables.SetElement{Key: source.AsSlice(), Val: binary.BigEndian.AppendUint32(nil, class)}
}

func compare(a, b Opening) int {
	return cmp.Or(a.From.Compare(b.From), a.To.Compare(b.To), cmp.Compare(a.Protocol, b.Protocol),
		cmp.Compare(a.First, b.First), cmp.Compare(a.Last, b.Last))
}

// key is one text for equal boxes.
func key(boxes []Opening) string {
	var out strings.Builder
	for _, e := range encode(0, boxes) {
		out.Write(e.Key)
		out.Write(e.KeyEnd)
	}
	return out.String()
}

// Registers of 32 bits each, as the kernel numbers them. Parts of a key stand in a row.
const (
	reg0 = unix.NFT_REG32_00
	reg1 = unix.NFT_REG32_01
	reg2 = unix.NFT_REG32_02
	reg3 = unix.NFT_REG32_03
)

// Offsets in the headers.
const (
	sourceOffset = 12 // of the network header
	destOffset   = 16
	portOffset   = 2 // of the transport header: the destination's
)

// rules judge a packet that comes into the gate, in this order. What is wrong with a packet ends its way before what
// would be right with it is asked.
func rules(l Layout) [][]expr.Any {
	out := [][]expr.Any{
		// The gate's own packets.
		{
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: unix.NFT_REG_1},
			equals(unix.NFT_REG_1, append([]byte("lo"), make([]byte, unix.IFNAMSIZ-2)...)),
			verdict(expr.VerdictAccept),
		},
		{
			&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg0},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: reg0, Data: []byte{unix.NFPROTO_IPV4}},
			verdict(expr.VerdictDrop),
		},
		// A source that is not behind this link.
		{
			&expr.Fib{Register: reg0, FlagSADDR: true, FlagIIF: true, ResultOIF: true},
			equals(reg0, []byte{0, 0, 0, 0}),
			verdict(expr.VerdictDrop),
		},
		// Names.
		ipv4(append([]expr.Any{
			address(destOffset, reg0),
			&expr.Bitwise{
				SourceRegister: reg0, DestRegister: reg0, Len: 4,
				Mask: net.CIDRMask(l.Names.Bits(), 32), Xor: []byte{0, 0, 0, 0},
			},
			equals(reg0, l.Names.Masked().Addr().AsSlice()),
			address(sourceOffset, reg0),
			&expr.Lookup{SourceRegister: reg0, SetName: named.Name, SetID: namedID},
		}, proxy(l)...)...),
		// Addresses. The class stands in the packet's mark, which is 0 before.
		ipv4(
			address(sourceOffset, reg0),
			&expr.Lookup{
				SourceRegister: reg0, DestRegister: reg0, IsDestRegSet: true, SetName: classes.Name, SetID: classesID,
			},
			&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: reg0},
		),
		{
			&expr.Meta{Key: expr.MetaKeyMARK, Register: reg0},
			&expr.Bitwise{
				SourceRegister: reg0, DestRegister: reg0, Len: 4, Xor: []byte{0, 0, 0, 0},
				Mask: binary.BigEndian.AppendUint32(nil, shards-1),
			},
			&expr.Lookup{
				SourceRegister: reg0, DestRegister: unix.NFT_REG_VERDICT, IsDestRegSet: true, SetName: shardOf.Name, SetID: shardsID,
			},
		},
	}
	for _, protocol := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		for _, p := range l.Ports {
			out = append(out, ipv4(
				address(destOffset, reg0),
				equals(reg0, l.Gateway.AsSlice()),
				&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg0},
				equals(reg0, []byte{protocol}),
				destPort(reg0),
				equals(reg0, binary.BigEndian.AppendUint16(nil, p)),
				address(sourceOffset, reg0),
				&expr.Lookup{SourceRegister: reg0, SetName: named.Name, SetID: namedID},
				verdict(expr.VerdictAccept),
			))
		}
	}
	return append(out,
		[]expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg0},
			equals(reg0, []byte{unix.IPPROTO_TCP}),
			&expr.Reject{Type: unix.NFT_REJECT_TCP_RST},
		},
		[]expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED}},
	)
}

// shardRule is the one rule of a shard's chain: class . destination . protocol . port.
func shardRule(l Layout, i int) []expr.Any {
	return ipv4(append([]expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: reg0},
		address(destOffset, reg1),
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg2},
		destPort(reg3),
		&expr.Lookup{SourceRegister: reg0, SetName: direct[i].Name, SetID: direct[i].ID},
	}, proxy(l)...)...)
}

// ipv4 says again what is known by then, for nft, which shows offsets else instead of names.
func ipv4(rest ...expr.Any) []expr.Any {
	return append([]expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg0},
		equals(reg0, []byte{unix.NFPROTO_IPV4}),
	}, rest...)
}

// proxy brings the packet to the proxy. Where nobody listens the packet goes on to the next rule.
func proxy(l Layout) []expr.Any {
	return []expr.Any{
		&expr.Immediate{Register: reg0, Data: l.Proxy.Addr().AsSlice()},
		&expr.Immediate{Register: reg1, Data: binary.BigEndian.AppendUint16(nil, l.Proxy.Port())},
		&expr.TProxy{Family: unix.NFPROTO_IPV4, TableFamily: unix.NFPROTO_INET, RegAddr: reg0, RegPort: reg1},
		&expr.Immediate{Register: reg0, Data: binary.NativeEndian.AppendUint32(nil, l.Mark)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: reg0},
		verdict(expr.VerdictAccept),
	}
}

func address(offset, register uint32) expr.Any {
	return &expr.Payload{Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4, DestRegister: register}
}

func destPort(register uint32) expr.Any {
	return &expr.Payload{Base: expr.PayloadBaseTransportHeader, Offset: portOffset, Len: 2, DestRegister: register}
}

func equals(register uint32, data []byte) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: register, Data: data}
}

func verdict(k expr.VerdictKind) expr.Any { return &expr.Verdict{Kind: k} }

func marshal(r []expr.Any) ([]byte, error) {
	var out bytes.Buffer
	for _, e := range r {
		b, err := expr.Marshal(unix.NFPROTO_INET, e)
		if err != nil {
			return nil, err
		}
		out.Write(b)
	}
	return out.Bytes(), nil
}
