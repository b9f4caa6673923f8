# Tells the state of this shell. Sections are told apart by a word that was not known before the shell started. Builtins
# are called so that neither aliases nor functions of the same names come in between.
\builtin local >/dev/null && {
	# It exits, or was interrupted, inside a function.
	\builtin echo '@TOKEN@ locals'
	\builtin local
}
\builtin echo '@TOKEN@ cwd'
\builtin pwd
\builtin echo '@TOKEN@ umask'
\builtin umask
\builtin echo '@TOKEN@ variables'
\builtin declare -p
\builtin echo '@TOKEN@ functions'
\builtin declare -f
\builtin echo '@TOKEN@ attributes'
\builtin declare -F
\builtin echo '@TOKEN@ aliases'
\builtin alias -p
\builtin echo '@TOKEN@ shopt'
\builtin shopt -p
\builtin echo '@TOKEN@ options'
\builtin set +o
\builtin echo '@TOKEN@ end'
