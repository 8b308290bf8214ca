# Exports the defaults of a GH200 job. Source it, from bash, zsh, dash or any POSIX shell and from any folder:
#
#     . scripts/setup_gh200_env.sh          with another value:  GH200_UVM_OVERSUBSCRIPTION_RATIO=3.0; . scripts/…
#
# A variable that is already set keeps its value, even an empty one. The script changes no shell option, defines no
# function and no other variable, never exits, needs no Python, and sets nothing that a stock PyTorch rejects.
# The values are those of supertuner/config/sources/gh200_exports.py (`supertuner env`); tests/tools/test_env.py compares them.
# shellcheck shell=sh

: "${SIMPLETUNER_GH200_ENABLE_UVM_HINTS=1}"
: "${GH200_UVM_OVERSUBSCRIPTION_RATIO=5.0}"
: "${GH200_UVM_ACCESS_PATTERN=gpu_first}"
: "${ACCELERATE_MIXED_PRECISION=bf16}"

# Exported without a value, so that a read-only variable is exported too.
export SIMPLETUNER_GH200_ENABLE_UVM_HINTS GH200_UVM_OVERSUBSCRIPTION_RATIO GH200_UVM_ACCESS_PATTERN ACCELERATE_MIXED_PRECISION

# A script that is run instead of sourced sets nothing for its caller. (In zsh, $0 is this file also when sourced.)
case "${ZSH_VERSION-}/$0" in
/setup_gh200_env.sh | /*/setup_gh200_env.sh)
    printf '%s\n' "gh200 env: run, not sourced: nothing is set in your shell; use:  . $0" >&2 || : ;;
*)
    printf '%s\n' "gh200 env: hints $SIMPLETUNER_GH200_ENABLE_UVM_HINTS, ratio $GH200_UVM_OVERSUBSCRIPTION_RATIO, $GH200_UVM_ACCESS_PATTERN, $ACCELERATE_MIXED_PRECISION" >&2 || : ;;
esac
