# Finds out what the interpreter is and what a new session begins with.
{
\command echo '@TOKEN@ interpreter'
if [ -n "${BASH_VERSION-}" ]; then
	\command echo "$BASH"
	\eval @BASH@
else
	(
		case @NAME@ in
		/*) \command echo @NAME@ ;;
		*/*) \command echo "$PWD"/@NAME@ ;;
		*)
			IFS=:
			for d in $PATH; do
				[ -x "$d"/@NAME@ ] && \command echo "$d"/@NAME@ && break
			done
			;;
		esac
	)
	\eval @SH@
fi
} 1<>@OUT@ 2>/dev/null
