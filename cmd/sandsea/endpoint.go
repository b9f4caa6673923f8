package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sandsea/sandsea/api/errdefs"
	"github.com/sandsea/sandsea/cmd/sandsea/ui"
	"github.com/sandsea/sandsea/internal/span"
)

// longestEndpoint is how long the API server lets an address hold that ends by itself.
const longestEndpoint = 30 * 24 * time.Hour

func (a *app) endpointCommand() *cobra.Command {
	var ttl time.Duration
	var open bool
	cmd := &cobra.Command{
		Use: "endpoint ID PORT", Short: "Print the address of a server inside a sandbox", Args: cobra.ExactArgs(2),
		Long: `Prints the URL at which a TCP server inside is reached through the API server, and the header that every request must
have. The header opens this port of this sandbox and nothing else, to whoever has it; it ends with the sandbox, or after
--ttl. The server may listen on any address inside or on the loopback one, and may start later: until then the answer is
502. What the platform answers in its place has a header Sandsea-Error.`,
		Example: `  sandsea endpoint s7q3k2m5 8000
  { read -r url; read -r header; } < <(sandsea endpoint --ttl 1h s7q3k2m5 8000)
  sandsea endpoint --open s7q3k2m5 8000   # to open in a browser
  sandsea endpoint --json s7q3k2m5 8000 | jq .headers`,
		ValidArgsFunction: a.completeID,
		RunE: func(cmd *cobra.Command, args []string) error {
			port, err := strconv.ParseUint(args[1], 10, 16)
			if err != nil || port == 0 {
				return misuse(errdefs.New(errdefs.Invalid, "", "endpoint: %s is no port", ui.Text(args[1])).WithField("port", "65535").
					WithHint("Give one from 1 to 65535, that the server inside listens on"))
			}
			if ttl < 0 {
				return misuse(errdefs.New(errdefs.Invalid, "", "--ttl %s is negative", ttl).WithField("ttl", "").WithHint("Write it as 1h"))
			}
			if ttl > longestEndpoint {
				return misuse(errdefs.New(errdefs.Invalid, "", "--ttl %s is more than %s", ttl, span.Short(longestEndpoint)).
					WithField("ttl", span.Short(longestEndpoint)).WithHint("Leave it out: the address then holds as long as the sandbox"))
			}
			sb, err := a.sandbox(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			e, err := sb.Endpoint(cmd.Context(), int(port), ttl)
			if err != nil {
				return err
			}
			switch {
			case a.json:
				return printJSON(a.io.Out, append(object{{"schema", "sandsea.endpoint/1"}, {"sandbox", sb.ID}, {"port", port}},
					members(e.ProtoReflect())...))
			case open:
				fmt.Fprintln(a.io.Out, ui.Text(e.GetBrowserUrl()))
				return nil
			}
			fmt.Fprintln(a.io.Out, ui.Text(e.GetUrl()))
			for _, name := range slices.Sorted(maps.Keys(e.GetHeaders())) {
				fmt.Fprintln(a.io.Out, ui.Text(name+": "+e.GetHeaders()[name]))
			}
			if at := e.GetExpiresAt(); at != nil {
				a.io.Note("holds for %s, and no longer than the sandbox", span.Short(at.AsTime().Sub(a.now()).Round(time.Second)))
			}
			return nil
		},
	}
	cmd.Flags().DurationVar(&ttl, "ttl", 0, "end so long from now, as 1h (default: with the sandbox)")
	cmd.Flags().BoolVar(&open, "open", false, "print one address for a browser instead; it holds the token")
	return cmd
}
