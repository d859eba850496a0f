//! Clients: they send requests, read, sometimes disconnect, and compare every token with the model's output without a
//! cache.

use std::sync::Arc;

use baton_connector::RequestId;

use crate::device;
use crate::messages::{ClientRequest, Msg, Node, Purpose};
use crate::net::{ConnId, Packet, Side};
use crate::setup::{SECOND, Setup};
use crate::sim::{Micros, Sim};

/// A client gives up after this long without a message.
const PATIENCE: Micros = 300 * SECOND;

/// How a client's request ended. Each request ends exactly once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientEnd {
    Complete,
    Error,
    /// The connection ended without a last event: the client knows that the text is cut.
    Cut,
    Left,
}

pub struct Client {
    pub ask: Arc<ClientRequest>,
    pub aggregate: bool,
    pub arrives: Micros,
    pub cancel_after: Option<Micros>,
    silently: bool,
    pub router: usize,
    conn: Option<ConnId>,
    got: Vec<usize>,
    right: Vec<u32>,
    pub end: Option<ClientEnd>,
}

pub struct Clients {
    pub asks: Vec<Client>,
}

impl Clients {
    pub fn new(setup: &Setup) -> Self {
        let asks = setup.clients.iter().enumerate().map(|(index, client)| Client {
            ask: Arc::new(ClientRequest {
                request: RequestId::new(&format!("{:x}-{index}", setup.seed)).expect("a request id"),
                prompt: client.prompt.clone(),
                max_new: client.max_new,
                choices: client.choices,
            }),
            aggregate: client.aggregate,
            arrives: client.arrives,
            cancel_after: client.cancel_after,
            silently: client.silently,
            router: client.router,
            conn: None,
            got: vec![0; client.choices as usize],
            right: device::reference(&client.prompt, client.max_new),
            end: None,
        });
        Self { asks: asks.collect() }
    }
}

impl Sim {
    pub fn client_sends(&mut self, client: usize) {
        let router = self.clients.asks[client].router;
        match self.connect(Node::Clients, Node::Router(router), Purpose::Ask(client)) {
            Some(conn) => {
                self.clients.asks[client].conn = Some(conn);
                self.watch_silence(conn, PATIENCE);
                self.send(conn, Side::Caller, Msg::Ask(client));
            }
            None => self.clients.asks[client].end = Some(ClientEnd::Error),
        }
    }

    pub fn client_cancels(&mut self, client: usize) {
        let cancelled = &mut self.clients.asks[client];
        if cancelled.end.is_some() {
            return;
        }
        cancelled.end = Some(ClientEnd::Left);
        let (conn, silently) = (cancelled.conn, cancelled.silently);
        let Some(conn) = conn else { return };
        if silently {
            self.counts.client_silent += 1;
            self.silence(conn);
        } else {
            self.counts.client_cancelled += 1;
            self.close(conn, Side::Caller);
        }
    }

    /// Handles a client's timeout.
    pub fn client_waited(&mut self, conn: ConnId) {
        let Purpose::Ask(index) = self.net.conns[conn.0].purpose else { return };
        if self.clients.asks[index].end.is_none() {
            self.clients.asks[index].end = Some(ClientEnd::Cut);
            self.counts.failed += 1;
            if self.setup.calm {
                self.wrong(format!("I11: client {index} waited in vain, and nothing had gone wrong"));
            }
        }
    }

    pub fn client_receives(&mut self, conn: ConnId, packet: Packet) {
        let Purpose::Ask(index) = self.net.conns[conn.0].purpose else { return };
        let client = &mut self.clients.asks[index];
        if client.end.is_some() {
            if !matches!(packet, Packet::End) {
                self.wrong(format!("I6: client {index} received {packet:?} after its end"));
            }
            return;
        }
        match packet {
            Packet::Message(Msg::Text { choice, token }) => {
                let at = &mut client.got[choice as usize];
                let right = client.right.get(*at).copied();
                *at += 1;
                if right != Some(token) {
                    let detail = format!("token {token} where the model says {right:?}");
                    self.wrong(format!("wrong text: client {index}, choice {choice}: {detail}"));
                }
            }
            Packet::Message(Msg::Complete) => {
                client.end = Some(ClientEnd::Complete);
                self.counts.completed += 1;
                if client.got.iter().any(|got| *got != client.right.len()) {
                    self.wrong(format!("wrong text: client {index} got it as complete, and it is not"));
                }
            }
            Packet::Message(_) => {
                client.end = Some(ClientEnd::Error);
                self.counts.failed += 1;
            }
            Packet::End => {
                client.end = Some(ClientEnd::Cut);
                self.counts.failed += 1;
            }
        }
    }
}
