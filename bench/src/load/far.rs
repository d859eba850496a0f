//! A host of its own for clients that vanish: a network namespace, one cable away.
//!
//! ```text
//!   this host: NEAR = 198.18.n.1/20 ── cable ── eth0, .2/20, and one /32 for each client: the namespace
//! ```
//!
//! A client vanishes by losing its address. From then on the kernel answers nothing that is sent to it and sends nothing
//! from it, a FIN or RST of a close included. The namespace has no name: one thread holds it, so the system removes it,
//! with its cable, when this process ends, however that happens. Linux, with root's capabilities and `ip` of iproute2.

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

/// Networks of 198.18.0.0/15, which RFC 2544 reserves for benchmarks, and addresses of each.
const NETS: u32 = 32;
const NET_ADDRESSES: u32 = 1 << 12;
const BENCHMARKS: u32 = u32::from_be_bytes([198, 18, 0, 0]);
/// In each network: this host, the other one, and its first client.
const NEAR: u32 = 1;
const FAR: u32 = 2;
const CLIENTS: u32 = 3;
/// Clients of one network, without its broadcast address. An address is used again after so many others.
const CLIENTS_MAX: u32 = NET_ADDRESSES - CLIENTS - 1;
/// Sockets that are waited for at once.
const WAITING_MAX: usize = 64;
/// A connection to a neighbour is there within this time.
const REACHED_WITHIN: Duration = Duration::from_secs(3);
/// The kernel answers at once.
const KERNEL_WITHIN: Duration = Duration::from_secs(5);

const _: () = assert!(NETS * NET_ADDRESSES == 1 << (32 - 15), "as many as are reserved");

/// A client's address, and where its socket goes.
type Wanted = (Ipv4Addr, oneshot::Sender<io::Result<TcpStream>>);

/// See the module's documentation.
pub(crate) struct FarHost {
    net: u32,
    next: AtomicU32,
    sockets: Option<mpsc::Sender<Wanted>>,
    addresses: Mutex<Addresses>,
}

/// What the thread in the namespace answers once it is set up.
type Ready = std::sync::mpsc::SyncSender<Result<Addresses, String>>;

impl FarHost {
    /// Makes one; blocks for some milliseconds.
    ///
    /// # Errors
    /// In words, where this machine lets this process make none.
    pub(crate) fn new() -> Result<Self, String> {
        for turn in 0..NETS {
            let net = std::process::id().wrapping_add(turn) % NETS;
            if !is_taken(net) {
                match Self::in_net(net) {
                    // Another process was quicker.
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
        // From here on the cable is taken away again.
        let host =
            Self { net, next: AtomicU32::new(0), sockets: Some(sockets), addresses: Mutex::new(addresses) };
        let link = link(net);
        ip(&format!("addr add {}/20 dev {link}", host.near()))?;
        ip(&format!("link set {link} up"))?;
        Ok(host)
    }

    /// The address of this host for those of the other one.
    pub(crate) fn near(&self) -> Ipv4Addr {
        address(self.net, NEAR)
    }

    /// A socket of the other host, with an address of its own.
    pub(super) async fn socket(&self) -> io::Result<TcpSocket> {
        let gone = || io::Error::other("the other host is gone");
        let number = self.next.fetch_add(1, Ordering::Relaxed) % CLIENTS_MAX;
        let (made, is_made) = oneshot::channel();
        let client = address(self.net, CLIENTS + number);
        self.change(Change::Add, client)?;
        let sockets = self.sockets.as_ref().ok_or_else(gone)?;
        sockets.send((client, made)).await.map_err(|_| gone())?;
        Ok(TcpSocket::from_std_stream(is_made.await.map_err(|_| gone())??))
    }

    /// The client with this address is gone, without a word.
    pub(super) fn vanish(&self, client: IpAddr) -> io::Result<()> {
        match client {
            IpAddr::V4(client) => self.change(Change::Delete, client),
            IpAddr::V6(_) => Err(io::Error::from(io::ErrorKind::AddrNotAvailable)),
        }
    }

    fn change(&self, change: Change, client: Ipv4Addr) -> io::Result<()> {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner).change(change, client)
    }

    /// Of an endpoint with these addresses, one that it has for the other host.
    ///
    /// # Errors
    /// In words, where no connection is possible from there.
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
        // The thread ends, and with it the namespace, as soon as its sockets are closed. The cable goes now.
        self.sockets = None;
        let _ = ip(&format!("link del {}", link(self.net)));
    }
}

/// Addresses of an endpoint as the other host sees them: what is on this host's loopback may be at its end of the cable.
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

/// This host's end of the cable; an interface's name has at most 15 bytes.
fn link(net: u32) -> String {
    format!("baton-far{net}")
}

/// Another process has this network, or this host uses it for something else.
fn is_taken(net: u32) -> bool {
    if_nametoindex(link(net).as_str()).is_ok() || UdpSocket::bind((address(net, NEAR), 0)).is_ok()
}

fn ip(words: &str) -> Result<(), String> {
    let run = Command::new("ip").args(words.split(' ')).stdin(Stdio::null()).output();
    let run = run.map_err(|error| format!("`ip` cannot be run: {error}"))?;
    let said = String::from_utf8_lossy(&run.stderr);
    let said: String = said.trim().chars().take(200).collect();
    if run.status.success() { Ok(()) } else { Err(format!("`ip {words}`: {said}")) }
}

/// The thread in the namespace: a socket belongs to the namespace in which it is made, whatever thread uses it.
fn far(net: u32, ready: &Ready, mut wanted: mpsc::Receiver<Wanted>) {
    let addresses = set_up(net);
    let failed = addresses.is_err();
    if ready.send(addresses).is_err() || failed {
        return;
    }
    while let Some((client, made)) = wanted.blocking_recv() {
        // A call that does not wait any more has closed it.
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
        // Forwarding would answer for a vanished client with ICMP. Where this cannot be written, forwarding is mostly off.
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

/// Adds and deletes addresses of the namespace, by rtnetlink: a program started for each would be milliseconds late.
struct Addresses {
    kernel: Socket,
    interface: u32,
    asked: u32,
}

#[derive(Clone, Copy)]
enum Change {
    Add,
    Delete,
}

impl Addresses {
    /// Of the namespace of this thread.
    fn open(interface: u32) -> io::Result<Self> {
        let kernel = Socket::new(
            Domain::from(libc::AF_NETLINK),
            Type::from(libc::SOCK_RAW),
            Some(Protocol::from(libc::NETLINK_ROUTE)),
        )?;
        kernel.set_read_timeout(Some(KERNEL_WITHIN))?;
        Ok(Self { kernel, interface, asked: 0 })
    }

    /// It is done when this returns.
    fn change(&mut self, change: Change, client: Ipv4Addr) -> io::Result<()> {
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
fn request(change: Change, client: Ipv4Addr, interface: u32, number: u32) -> Vec<u8> {
    const PREFIX_BITS: u8 = 32;
    let (kind, flags) = match change {
        Change::Add => (libc::RTM_NEWADDR, libc::NLM_F_CREATE | libc::NLM_F_REPLACE),
        Change::Delete => (libc::RTM_DELADDR, 0),
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

/// The error of `struct nlmsgerr`, which is 0 where all is well; `None`: this is no answer to that request.
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

    /// `None`, and a word about it, where this machine lets the test make none.
    fn far_host() -> Option<FarHost> {
        let made = FarHost::new();
        if let Err(why) = &made {
            eprintln!("SKIPPED: this machine makes no network namespaces, so no client can vanish: {why}");
        }
        made.ok()
    }

    /// How a connection ends for its peer, which sends something after its client has closed, in this way, what it has.
    async fn end_for_its_peer(host: &FarHost, vanishes: bool) -> io::Result<usize> {
        let listener = TcpListener::bind((host.near(), 0)).await?;
        let client = host.socket().await?.connect(listener.local_addr()?).await?;
        let (mut peer, from) = listener.accept().await?;
        assert_eq!(from, client.local_addr()?);
        peer.write_all(b"before").await?;
        let mut read = [0; 6];
        let mut client = client;
        client.read_exact(&mut read).await?;
        // What ends the wait: the peer's own system gives up a host that acknowledges nothing.
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
        // The others of that host are there still, and what is gone cannot go again.
        assert!(host.vanish(address(host.net, CLIENTS).into()).is_err());
    }

    #[tokio::test]
    async fn what_listens_everywhere_is_reached_from_there_and_what_listens_on_loopback_is_not() {
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
    fn two_of_them_are_there_at_once_and_nothing_is_left_of_them() {
        let (Some(one), Some(two)) = (far_host(), far_host()) else { return };
        assert_ne!(one.near(), two.near());
        let nets = [one.net, two.net];
        let cables = || nets.map(|net| if_nametoindex(link(net).as_str()).ok());
        let before = cables();
        assert!(nets.iter().all(|net| is_taken(*net)) && before.iter().all(Option::is_some));
        drop((one, two));
        // Another test may have the network by now; it has a cable of its own.
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
    fn only_an_answer_to_its_own_request_counts() {
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
