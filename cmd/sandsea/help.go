package main

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// helpWidth is how wide the lines of flags in help may be.
const helpWidth = 80

// printHelp shows a command: examples first, since most people look for the line to copy.
func (a *app) printHelp(cmd *cobra.Command, _ []string) {
	var b strings.Builder
	part := func(title, body string) {
		if body = strings.TrimRight(body, " \n"); body != "" {
			fmt.Fprintf(&b, "\n%s\n%s\n", title, body)
		}
	}
	fmt.Fprintln(&b, cmd.Short)
	part("Examples:", examples(cmd))
	part("Usage:", "  "+cmd.UseLine())
	if cmd.Long != "" {
		fmt.Fprintf(&b, "\n%s\n", wrapped(cmd.Long))
	}
	var commands strings.Builder
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			fmt.Fprintf(&commands, "  %-11s %s\n", c.Name(), c.Short)
		}
	}
	part("Commands:", commands.String())
	part("Flags:", flagLines(cmd.LocalNonPersistentFlags()))
	part("For every command:", flagLines(cmd.Root().PersistentFlags()))
	fmt.Fprint(cmd.OutOrStdout(), a.io.Plain(b.String()))
}

// examples are the command's own, or else the lines of its group's that name it.
func examples(cmd *cobra.Command) string {
	if cmd.Example != "" || !cmd.HasParent() {
		return cmd.Example
	}
	var own strings.Builder
	for line := range strings.Lines(cmd.Parent().Example) {
		if strings.Contains(line, cmd.CommandPath()) {
			own.WriteString(line)
		}
	}
	return own.String()
}

// wrapped breaks paragraphs at helpWidth; lines that begin with a space stay as they are.
func wrapped(text string) string {
	var b strings.Builder
	column := 0
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if line == "" || line[0] == ' ' {
			if column > 0 {
				b.WriteByte('\n')
			}
			b.WriteString(line + "\n")
			column = 0
			continue
		}
		for word := range strings.FieldsSeq(line) {
			switch n := utf8.RuneCountInString(word); {
			case column == 0:
				column = n
			case column+1+n <= helpWidth:
				b.WriteByte(' ')
				column += 1 + n
			default:
				b.WriteByte('\n')
				column = n
			}
			b.WriteString(word)
		}
	}
	return strings.TrimRight(b.String(), "\n")
}

func flagLines(f *pflag.FlagSet) string {
	shown := pflag.NewFlagSet("", pflag.ContinueOnError)
	f.VisitAll(func(f *pflag.Flag) {
		if f.Name != "help" {
			shown.AddFlag(f)
		}
	})
	return shown.FlagUsagesWrapped(helpWidth)
}

// helpCommand is `sandsea help COMMAND`; unlike cobra's own it fails for a command that is not there.
func helpCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND]", Short: "Show a command's help", Example: "  sandsea help run",
		RunE: func(_ *cobra.Command, args []string) error {
			cmd := root
			for _, word := range args {
				next, rest, err := cmd.Find([]string{word})
				if err != nil || next == cmd || len(rest) > 0 {
					return unknownCommand(cmd, word)
				}
				cmd = next
			}
			return cmd.Help()
		},
	}
}

func (a *app) completionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "completion bash|zsh|fish", Short: "Print a script that completes commands, flags and ids",
		Example: `  source <(sandsea completion bash)
  sandsea completion zsh > "${fpath[1]}/_sandsea"
  sandsea completion fish > ~/.config/fish/completions/sandsea.fish`,
		Args: cobra.ExactArgs(1), ValidArgs: []string{"bash", "zsh", "fish"},
		RunE: func(cmd *cobra.Command, args []string) error {
			switch args[0] {
			case "bash":
				return cmd.Root().GenBashCompletionV2(a.io.Out, true)
			case "zsh":
				return cmd.Root().GenZshCompletion(a.io.Out)
			case "fish":
				return cmd.Root().GenFishCompletion(a.io.Out, true)
			}
			return usage(cmd, "completion %s: bash, zsh or fish", args[0])
		},
	}
}
