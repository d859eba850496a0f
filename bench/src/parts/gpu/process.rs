//! A producer of KV blocks as a child process: this program, started again. It opens a lease of all its blocks for each
//! line on its standard input.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use baton_connector::transport::{Peer, Producer};
use baton_connector::{BlockId, Epoch, Handle};

use super::pool::table;
use crate::BenchError;
use crate::parts::transfer::producer::BenchProducer;

/// A producer, as its consumer sees it. Dropping kills it.
pub(super) struct ProducerProcess {
    pub(super) process: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    pub(super) peer: Peer,
}

impl ProducerProcess {
    pub(super) fn start(command: &mut Command) -> Result<Self, BenchError> {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (stdin, stdout) = (process.stdin.take(), process.stdout.take());
        let (Some(stdin), Some(stdout)) = (stdin, stdout) else { return Err("pipes were asked for".into()) };
        let peer = Peer { address: ([127, 0, 0, 1], 1).into(), epoch: Epoch(0), fingerprint: 1 };
        let mut other = Self { process, stdin, stdout: BufReader::new(stdout), peer };
        let line = other.read_line("producer")?;
        let mut numbers = line.split_whitespace();
        other.peer.epoch = Epoch(numbers.next().unwrap_or_default().parse()?);
        other.peer.address.set_port(numbers.next().unwrap_or_default().parse()?);
        Ok(other)
    }

    /// The text after a word at the beginning of a line. Libraries may write other lines.
    fn read_line(&mut self, word: &str) -> Result<String, BenchError> {
        let mut line = String::new();
        while self.stdout.read_line(&mut line)? > 0 {
            if let Some(rest) = line.strip_prefix(word) {
                return Ok(rest.trim().to_owned());
            }
            line.clear();
        }
        Err(format!("the producer ended without {word:?}").into())
    }

    pub(super) fn request_lease(&mut self) -> Result<Handle, BenchError> {
        writeln!(self.stdin, "lend")?;
        Ok(Handle(self.read_line("lent")?.parse()?))
    }
}

impl Drop for ProducerProcess {
    fn drop(&mut self) {
        // A stopped process can be killed too.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Opens the leases of this process, until its standard input ends.
pub(super) fn open_leases(producer: &BenchProducer, port: u16) -> io::Result<()> {
    let blocks = table(producer.region().blocks());
    let ids: Vec<_> = blocks.into_iter().map(|block| BlockId(block as u32)).collect();
    let mut out = io::stdout().lock();
    // Each line begins with a line break: a library may have written a line without its end.
    writeln!(out, "\nproducer {} {port}", producer.epoch().0)?;
    out.flush()?;
    for line in io::stdin().lines() {
        line?;
        writeln!(out, "\nlent {}", producer.open_lease(&ids).0)?;
        out.flush()?;
    }
    Ok(())
}
