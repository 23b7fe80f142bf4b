# The network and the HCAs, for a virtual machine and for the host's own
# rdma_rxe alike. The caller defines `host` (runs a program of the host's
# tree) and `fail` (ends the boot with a message), and sets
#   HCAS      how many HCAs: 0, 1 or 2
#   WIRE      yes: this machine is one end of a wire, its netdev is there already
#   ADDR      the IPv4 address of d0, ADDR6 the IPv6 address
#   RXE       the name of the first HCA (rxe0)
# shellcheck shell=sh
# shellcheck disable=SC2153

set_sysctl() { # name value; a kernel without the knob does not need it
    [ -w "/proc/sys/$1" ] && echo "$2" >"/proc/sys/$1"
}

# Addresses usable at once: no duplicate detection, no router solicitation.
quiet_ipv6() {
    for scope in all default; do
        set_sysctl "net/ipv6/conf/$scope/accept_dad" 0
        set_sysctl "net/ipv6/conf/$scope/accept_ra" 0
    done
}

# A packet that arrives from one of the machine's own addresses is a martian,
# unless told otherwise: with two HCAs the wire between them is in one machine.
allow_own_addresses() {
    for dev in all default d0 d1; do
        set_sysctl "net/ipv4/conf/$dev/rp_filter" 0
        set_sysctl "net/ipv4/conf/$dev/accept_local" 1
    done
    set_sysctl net/ipv4/conf/all/arp_ignore 1
    set_sysctl net/ipv4/conf/all/arp_announce 2
}

add_hca() { # name netdev address-tail-as-gid
    host rdma link add "$1" type rxe netdev "$2" ||
        fail "rdma link add $1 type rxe netdev $2 failed"
    tries=0
    while :; do
        state=$(cat "/sys/class/infiniband/$1/ports/1/state" 2>/dev/null)
        case $state in
        *ACTIVE*) grep -qs "ffff:$3\$" "/sys/class/infiniband/$1/ports/1/gids/"* && return ;;
        esac
        tries=$((tries + 1))
        [ "$tries" -gt 100 ] && fail "HCA $1 did not become active with its address (state: $state)"
        sleep 0.1
    done
}

add_addresses() { # netdev ipv4 ipv6
    host ip addr add "$2/24" dev "$1" || fail "no address $2 for $1"
    host ip link set "$1" up || fail "$1 does not come up"
    if [ -d /proc/sys/net/ipv6 ]; then
        host ip -6 addr add "$3/64" dev "$1" nodad || fail "no address $3 for $1"
    fi
}

gid_tail() { # 10.0.0.1 -> 0a00:0001
    # shellcheck disable=SC2046,SC2183
    printf '%02x%02x:%02x%02x' $(echo "$1" | tr . ' ')
}

set_up_network() {
    quiet_ipv6
    host ip link set lo up
    if [ "$WIRE" = yes ]; then
        : # d0 is there
    elif [ "$HCAS" = 2 ]; then
        host ip link add d0 type veth peer name d1 || fail "no veth devices"
        allow_own_addresses
    else
        host ip link add d0 type dummy || fail "no dummy device"
    fi
    add_addresses d0 "$ADDR" "$ADDR6"
    [ "$HCAS" = 2 ] && add_addresses d1 10.0.0.2 fd00::2
    [ "$HCAS" = 0 ] && return
    add_hca "$RXE" d0 "$(gid_tail "$ADDR")"
    [ "$HCAS" = 2 ] && add_hca rxe1 d1 "$(gid_tail 10.0.0.2)"
    return 0
}
