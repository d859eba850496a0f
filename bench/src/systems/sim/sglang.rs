//! Options that only SGLang engines have, and a fleet of either kind.

use std::net::SocketAddr;

use crate::sim::engines::{AbortExchange, FleetPlan, SglangFleet, SglangPlan, SimFleet};

/// Options of `--dialect sglang`.
#[derive(Clone, Debug, clap::Args)]
pub struct SglangOptions {
    /// Data-parallel ranks per SGLang engine
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub dp_size: usize,
    /// First SGLang prefill engine's bootstrap port, the next engine's is one more; 0 picks free ports
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub bootstrap_port: u16,
    /// Factor of SGLang's timeouts, heartbeats and polling intervals
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub time_scale: f64,
    /// Whether an SGLang engine notifies the other leg's engine when a leg ends without success
    #[arg(long, value_name = "NAME", value_enum, default_value_t = AbortExchange::default())]
    pub abort_exchange: AbortExchange,
}

impl SglangOptions {
    /// The plan, not yet checked.
    pub(super) fn plan(&self, fleet: FleetPlan) -> SglangPlan {
        SglangPlan {
            fleet,
            ranks: self.dp_size,
            aborts: self.abort_exchange,
            time_scale: self.time_scale,
            bootstrap_port: self.bootstrap_port,
        }
    }
}

/// Running engines of one dialect.
pub(super) enum StartedFleet {
    Pull(SimFleet),
    Sglang(SglangFleet),
}

impl StartedFleet {
    /// The addresses, as `NAME=ADDRESS,…` separated by spaces.
    pub(super) fn addresses(&self) -> String {
        let list = |addresses: Vec<SocketAddr>| {
            addresses.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",")
        };
        match self {
            Self::Pull(fleet) => {
                format!("prefill={} decode={}", list(fleet.prefill()), list(fleet.decode()))
            }
            Self::Sglang(fleet) => {
                let (prefill, decode) = (list(fleet.prefill()), list(fleet.decode()));
                format!("prefill={prefill} decode={decode} bootstrap={}", list(fleet.bootstrap()))
            }
        }
    }

    pub(super) fn router_yaml(&self, listen: SocketAddr, admin: SocketAddr) -> String {
        match self {
            Self::Pull(fleet) => fleet.router_yaml(listen, admin),
            Self::Sglang(fleet) => fleet.router_yaml(listen, admin),
        }
    }
}
