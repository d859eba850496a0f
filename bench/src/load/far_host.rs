//! A separate host for clients that vanish: a network namespace behind a virtual cable.
//!
//! ```text
//!   this host: NEAR = 198.18.n.1/20 ── cable ── eth0, .2/20, and one /32 for each client: the namespace
//! ```
//!
//! A client vanishes by losing its address. From then on the kernel sends nothing from that address, not even the
//! FIN or RST of a close, and answers nothing. The namespace has no name: one thread holds it. The system therefore
//! removes the namespace and its cable when this process ends, however it ends. Requires Linux, root's capabilities
//! and `ip` of iproute2.

use std::io::{self, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::net::if_::if_nametoindex;
use nix::sched::{CloneFlags, unshare};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpSocket;
use tokio::sync::{mpsc, oneshot};

/// Number of networks in 198.18.0.0/15, which RFC 2544 reserves for benchmarks, and addresses per network.
const NETS: u32 = 32;
const NET_ADDRESSES: u32 = 1 << 12;
const BENCHMARKS: u32 = u32::from_be_bytes([198, 18, 0, 0]);
/// Numbers in each network: this host, the far host, and the first client.
const NEAR: u32 = 1;
const FAR: u32 = 2;
const CLIENTS: u32 = 3;
/// Clients of one network, without its broadcast address. An address is reused after this number of others.
const CLIENTS_MAX: u32 = NET_ADDRESSES - CLIENTS - 1;
/// Maximum of socket requests in the queue.
const WAITING_MAX: usize = 64;
/// Maximum time to connect to a neighbour.
const REACHED_WITHIN: Duration = Duration::from_secs(3);
/// Maximum time of a response of the kernel.
const KERNEL_WITHIN: Duration = Duration::from_secs(5);

const _: () = assert!(NETS * NET_ADDRESSES == 1 << (32 - 15), "as many as are reserved");

/// A client's address, and where its socket is sent.
type SocketRequest = (Ipv4Addr, oneshot::Sender<io::Result<TcpStream>>);

/// The other host. See the module documentation.
pub(crate) struct FarHost {
    net: u32,
    next: AtomicU32,
    sockets: Option<mpsc::Sender<SocketRequest>>,
    addresses: Mutex<Addresses>,
}

/// Result of the setup in the namespace's thread.
type ReadySender = std::sync::mpsc::SyncSender<Result<Addresses, String>>;

impl FarHost {
    /// Creates a host. Blocks for some milliseconds.
    ///
    /// # Errors
    /// If this process may not create one on this machine.
    pub(crate) fn new() -> Result<Self, String> {
        for turn in 0..NETS {
            let net = std::process::id().wrapping_add(turn) % NETS;
            if !is_taken(net) {
                match Self::in_net(net) {
                    // Another process took this network first.
                    Err(_) if is_taken(net) => {}
                    made => return made,
                }
            }
        }
        Err("all networks of 198.18.0.0/15 are in use".into())
    }

    fn in_net(net: u32) -> Result<Self, String> {
        let (sockets, wanted) = mpsc::channel(WAITING_MAX);
        let (ready, is_ready) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name("far host".into());
        thread.spawn(move || far(net, &ready, wanted)).map_err(|error| error.to_string())?;
        let addresses = is_ready.recv().map_err(|_| "its thread ended".to_owned())??;
        // From here on `drop` removes the cable.
        let host =
            Self { net, next: AtomicU32::new(0), sockets: Some(sockets), addresses: Mutex::new(addresses) };
        let link = link(net);
        ip(&format!("addr add {}/20 dev {link}", host.near()))?;
        ip(&format!("link set {link} up"))?;
        Ok(host)
    }

    /// The address of this host, as seen from the other one.
    pub(crate) fn near(&self) -> Ipv4Addr {
        address(self.net, NEAR)
    }

    /// A socket of the other host, with its own address.
    pub(super) async fn socket(&self) -> io::Result<TcpSocket> {
        let gone = || io::Error::other("the other host is gone");
        let number = self.next.fetch_add(1, Ordering::Relaxed) % CLIENTS_MAX;
        let (made, is_made) = oneshot::channel();
        let client = address(self.net, CLIENTS + number);
        self.change(AddressChange::Add, client)?;
        let sockets = self.sockets.as_ref().ok_or_else(gone)?;
        sockets.send((client, made)).await.map_err(|_| gone())?;
        Ok(TcpSocket::from_std_stream(is_made.await.map_err(|_| gone())??))
    }

    /// Removes the client's address: the client vanishes.
    pub(super) fn vanish(&self, client: IpAddr) -> io::Result<()> {
        match client {
            IpAddr::V4(client) => self.change(AddressChange::Delete, client),
            IpAddr::V6(_) => Err(io::Error::from(io::ErrorKind::AddrNotAvailable)),
        }
    }

    fn change(&self, change: AddressChange, client: Ipv4Addr) -> io::Result<()> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner).change(change, client)
    }

    /// One of the endpoint's addresses that the other host can reach.
    ///
    /// # Errors
    /// If no connection is possible from there.
    pub(crate) async fn reach(&self, endpoint: &[SocketAddr]) -> Result<SocketAddr, String> {
        let mut tried = Vec::new();
        for there in seen_from_there(endpoint, self.near()) {
            let connect = async { self.socket().await?.connect(there).await };
            match tokio::time::timeout(REACHED_WITHIN, connect).await {
                Ok(Ok(_)) => return Ok(there),
                Ok(Err(error)) => tried.push(format!("{there}: {error}")),
                Err(_) => tried.push(format!("{there}: no answer within {REACHED_WITHIN:?}")),
            }
        }
        if tried.is_empty() {
            tried.push("it has no IPv4 address".into());
        }
        Err(format!("from another host the deployment cannot be reached ({})", tried.join("; ")))
    }
}

impl Drop for FarHost {
    fn drop(&mut self) {
        // The thread and the namespace end when the last socket is closed. The cable is removed now.
        self.sockets = None;
        let _ = ip(&format!("link del {}", link(self.net)));
    }
}

/// Addresses of an endpoint as the other host sees them. This host's loopback becomes its end of the cable.
fn seen_from_there(endpoint: &[SocketAddr], near: Ipv4Addr) -> Vec<SocketAddr> {
    let mut seen = Vec::new();
    for address in endpoint {
        let there = match address.ip() {
            ip if ip.is_loopback() || ip.is_unspecified() => SocketAddr::new(near.into(), address.port()),
            IpAddr::V4(_) => *address,
            IpAddr::V6(_) => continue,
        };
        if !seen.contains(&there) {
            seen.push(there);
        }
    }
    seen
}

fn address(net: u32, number: u32) -> Ipv4Addr {
    Ipv4Addr::from(BENCHMARKS + net * NET_ADDRESSES + number)
}

/// This host's end of the cable. An interface name has at most 15 bytes.
fn link(net: u32) -> String {
    format!("baton-far{net}")
}

/// Whether another process has this network, or this host uses it otherwise.
fn is_taken(net: u32) -> bool {
    if_nametoindex(link(net).as_str()).is_ok() || UdpSocket::bind((address(net, NEAR), 0)).is_ok()
}

fn ip(words: &str) -> Result<(), String> {
    let run = Command::new("ip").args(words.split(' ')).stdin(Stdio::null()).output();
    let run = run.map_err(|error| format!("`ip` cannot be run: {error}"))?;
    let output = String::from_utf8_lossy(&run.stderr);
    let output: String = output.trim().chars().take(200).collect();
    if run.status.success() { Ok(()) } else { Err(format!("`ip {words}`: {output}")) }
}

/// The thread in the namespace. A socket belongs to the namespace in which it is created, whichever thread uses it.
fn far(net: u32, ready: &ReadySender, mut wanted: mpsc::Receiver<SocketRequest>) {
    let addresses = set_up(net);
    let failed = addresses.is_err();
    if ready.send(addresses).is_err() || failed {
        return;
    }
    while let Some((client, made)) = wanted.blocking_recv() {
        // If the call was dropped, the socket is closed.
        let _ = made.send(socket(client));
    }
}

fn set_up(net: u32) -> Result<Addresses, String> {
    let refused =
        |error: nix::Error| format!("a network namespace takes root or CAP_SYS_ADMIN: {}", error.desc());
    unshare(CloneFlags::CLONE_NEWNET).map_err(refused)?;
    let (near, far) = (address(net, NEAR), address(net, FAR));
    ip(&format!("link add eth0 type veth peer name {} netns {}", link(net), std::process::id()))?;
    let connected = || {
        ip("link set lo up")?;
        ip(&format!("addr add {far}/20 dev eth0"))?;
        ip("link set eth0 up")?;
        ip(&format!("route add default via {near}"))?;
        // With forwarding, ICMP would answer for a vanished client. Where this file cannot be written, forwarding is
        // usually off.
        let _ = std::fs::write("/proc/sys/net/ipv4/ip_forward", "0");
        let addresses = if_nametoindex("eth0").map_err(io::Error::from).and_then(Addresses::open);
        addresses.map_err(|error| format!("its addresses: {error}"))
    };
    let connected = connected();
    if connected.is_err() {
        let _ = ip("link del eth0");
    }
    connected
}

fn socket(client: Ipv4Addr) -> io::Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    socket.bind(&SocketAddr::from((client, 0)).into())?;
    Ok(socket.into())
}

/// Adds and deletes addresses of the namespace by rtnetlink. Starting a program for each takes milliseconds.
struct Addresses {
    kernel: Socket,
    interface: u32,
    asked: u32,
}

#[derive(Clone, Copy)]
enum AddressChange {
    Add,
    Delete,
}

impl Addresses {
    /// Addresses of this thread's namespace.
    fn open(interface: u32) -> io::Result<Self> {
        let kernel = Socket::new(
            Domain::from(libc::AF_NETLINK),
            Type::from(libc::SOCK_RAW),
            Some(Protocol::from(libc::NETLINK_ROUTE)),
        )?;
        kernel.set_read_timeout(Some(KERNEL_WITHIN))?;
        Ok(Self { kernel, interface, asked: 0 })
    }

    /// Returns when the change is in effect.
    fn change(&mut self, change: AddressChange, client: Ipv4Addr) -> io::Result<()> {
        self.asked += 1;
        self.kernel.write_all(&request(change, client, self.interface, self.asked))?;
        let mut answer = [0; 256];
        let length = self.kernel.read(&mut answer)?;
        match refusal(&answer[..length], self.asked) {
            Some(0) => Ok(()),
            Some(error) => Err(io::Error::from_raw_os_error(-error)),
            None => Err(io::Error::other("the kernel's answer is none")),
        }
    }
}

/// `struct nlmsghdr`, `struct ifaddrmsg`, and two attributes: see rtnetlink(7).
fn request(change: AddressChange, client: Ipv4Addr, interface: u32, number: u32) -> Vec<u8> {
    const PREFIX_BITS: u8 = 32;
    let (kind, flags) = match change {
        AddressChange::Add => (libc::RTM_NEWADDR, libc::NLM_F_CREATE | libc::NLM_F_REPLACE),
        AddressChange::Delete => (libc::RTM_DELADDR, 0),
    };
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK | flags) as u16;
    let family = u8::try_from(libc::AF_INET).expect("it is 2");
    let mut body = vec![family, PREFIX_BITS, 0, libc::RT_SCOPE_UNIVERSE];
    body.extend(interface.to_ne_bytes());
    for attribute in [libc::IFA_LOCAL, libc::IFA_ADDRESS] {
        body.extend(8_u16.to_ne_bytes());
        body.extend(attribute.to_ne_bytes());
        body.extend(client.octets());
    }
    let length = u32::try_from(16 + body.len()).expect("it is short");
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend(number.to_ne_bytes());
    message.extend(0_u32.to_ne_bytes());
    message.extend(body);
    message
}

/// The error of `struct nlmsgerr`, which is 0 on success. `None` if this is no answer to that request.
fn refusal(answer: &[u8], number: u32) -> Option<i32> {
    let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
    let of = u32::from_ne_bytes(answer.get(8..12)?.try_into().ok()?);
    let error = i32::from_ne_bytes(answer.get(16..20)?.try_into().ok()?);
    (i32::from(kind) == libc::NLMSG_ERROR && of == number && error <= 0).then_some(error)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    /// `None`, with a message, if this machine does not allow one.
    fn far_host() -> Option<FarHost> {
        let made = FarHost::new();
        if let Err(why) = &made {
            eprintln!("SKIPPED: this machine makes no network namespaces, so no client can vanish: {why}");
        }
        made.ok()
    }

    /// How a connection ends for a server that writes after its client has vanished or reset.
    async fn end_for_its_peer(host: &FarHost, vanishes: bool) -> io::Result<usize> {
        let listener = TcpListener::bind((host.near(), 0)).await?;
        let client = host.socket().await?.connect(listener.local_addr()?).await?;
        let (mut peer, from) = listener.accept().await?;
        assert_eq!(from, client.local_addr()?);
        peer.write_all(b"before").await?;
        let mut read = [0; 6];
        let mut client = client;
        client.read_exact(&mut read).await?;
        // The server's system gives up a host that acknowledges nothing.
        socket2::SockRef::from(&peer).set_tcp_user_timeout(Some(Duration::from_millis(500)))?;
        if vanishes {
            host.vanish(from.ip())?;
        }
        socket2::SockRef::from(&client).set_linger(Some(Duration::ZERO))?;
        drop(client);
        peer.write_all(b"after").await?;
        peer.read(&mut read).await
    }

    #[tokio::test]
    async fn a_client_that_vanishes_sends_neither_fin_nor_rst_and_one_that_resets_does() {
        let Some(host) = far_host() else { return };
        let silent = [io::ErrorKind::TimedOut, io::ErrorKind::HostUnreachable];
        let error = end_for_its_peer(&host, true).await.expect_err("no FIN");
        assert!(silent.contains(&error.kind()), "{error}");
        let error = end_for_its_peer(&host, false).await.expect_err("no FIN");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        // Other clients of that host remain. A vanished client cannot vanish again.
        assert!(host.vanish(address(host.net, CLIENTS).into()).is_err());
    }

    #[tokio::test]
    async fn a_wildcard_listener_is_reachable_and_a_loopback_one_is_not() {
        let Some(host) = far_host() else { return };
        let everywhere = TcpListener::bind("0.0.0.0:0").await.expect("a port");
        let port = everywhere.local_addr().expect("bound").port();
        let reached = host.reach(&[SocketAddr::from(([127, 0, 0, 1], port))]).await;
        assert_eq!(reached, Ok(SocketAddr::from((host.near(), port))));
        let loopback = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let refused = host.reach(&[loopback.local_addr().expect("bound")]).await.expect_err("not there");
        assert!(refused.contains("refused"), "{refused}");
    }

    #[test]
    fn two_far_hosts_coexist_and_are_removed() {
        let (Some(one), Some(two)) = (far_host(), far_host()) else { return };
        assert_ne!(one.near(), two.near());
        let nets = [one.net, two.net];
        let cables = || nets.map(|net| if_nametoindex(link(net).as_str()).ok());
        let before = cables();
        assert!(nets.iter().all(|net| is_taken(*net)) && before.iter().all(Option::is_some));
        drop((one, two));
        // Another test may have the network by now, but with another cable.
        assert!(cables().iter().zip(before).all(|(now, before)| *now != before));
    }

    #[test]
    fn loopback_is_this_hosts_end_of_the_cable() {
        let (near, [a, b]) = (Ipv4Addr::new(198, 18, 16, 1), ["127.0.0.1:8000", "10.1.2.3:8000"]);
        let parse = |text: &str| text.parse::<SocketAddr>().expect("an address");
        let seen = seen_from_there(&[a, "[::1]:8000", b, "[fd00::1]:8000"].map(parse), near);
        assert_eq!(seen, [SocketAddr::from((near, 8_000)), parse(b)]);
        assert_eq!(address(NETS - 1, NET_ADDRESSES - 1), Ipv4Addr::new(198, 19, 255, 255));
    }

    #[test]
    fn only_the_reply_to_its_own_request_counts() {
        let answer = |kind: u16, number: u32, error: i32| {
            let mut bytes = 36_u32.to_ne_bytes().to_vec();
            bytes.extend([kind.to_ne_bytes(), [0, 0]].concat());
            bytes.extend([number.to_ne_bytes(), [0; 4]].concat());
            bytes.extend(error.to_ne_bytes());
            bytes
        };
        assert_eq!(refusal(&answer(2, 7, 0), 7), Some(0));
        assert_eq!(refusal(&answer(2, 7, -99), 7), Some(-99));
        for wrong in [answer(2, 8, 0), answer(3, 7, 0), answer(2, 7, 5), answer(2, 7, 0)[..17].to_vec()] {
            assert_eq!(refusal(&wrong, 7), None);
        }
    }
}
