//! The options of `baton sidecar`: those of llm-d's routing sidecar, by their names there.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use baton_router::{SidecarSettings, UNSUPPORTED};
use clap::builder::ValueParser;
use clap::{Arg, ArgMatches, Args, Command, Error, FromArgMatches};

#[derive(Debug, Args)]
pub(crate) struct SidecarArgs {
    /// Port of rank 0; rank r listens at the port + r [default: 8000]
    #[arg(long, value_name = "N")]
    port: Option<u16>,
    /// Address to listen at [default: 0.0.0.0]
    #[arg(long, value_name = "IP")]
    host: Option<IpAddr>,
    /// Port of the decode engine on localhost; that of rank r is the port + r [default: 8200]
    #[arg(long, value_name = "PORT")]
    model_server_port: Option<u16>,
    /// Deprecated name of --model-server-port
    #[arg(long, value_name = "PORT")]
    vllm_port: Option<u16>,
    /// Data-parallel ranks of the decode engine [default: 1]
    #[arg(long, value_name = "N")]
    data_parallel_size: Option<u16>,
    /// How the engines exchange blocks: nixlv2 or sglang [default: nixlv2]
    #[arg(long, value_name = "NAME")]
    kv_connector: Option<String>,
    /// Serve TLS, with a self-signed certificate unless --cert-path is set [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    secure_proxy: Option<bool>,
    /// Directory with tls.crt and tls.key
    #[arg(long, value_name = "DIR")]
    cert_path: Option<PathBuf>,
    /// Engines that serve TLS: prefiller, decoder
    #[arg(long, value_name = "STAGES", value_delimiter = ',')]
    enable_tls: Option<Vec<String>>,
    /// Engines whose certificates are not checked: none or all of --enable-tls
    #[arg(long, value_name = "STAGES", value_delimiter = ',')]
    tls_insecure_skip_verify: Option<Vec<String>>,
    /// Roots of the engines' certificates [default: /etc/ssl/certs/ca-certificates.crt]
    #[arg(long, value_name = "FILE")]
    tls_ca_path: Option<PathBuf>,
    /// File with the cluster secret for listed prefill engines, also by BATON_CLUSTER_SECRET_FILE
    #[arg(long, value_name = "FILE")]
    cluster_secret_file: Option<PathBuf>,
    /// Engines that get the cluster secret: prefiller, decoder [default: prefiller]
    #[arg(long, value_name = "STAGES", value_delimiter = ',')]
    cluster_secret_stages: Option<Vec<String>>,
    /// Prefill engines that requests may name, beside the Pods of --inference-pool [default: all]
    #[arg(long, value_name = "CIDR|HOST", value_delimiter = ',')]
    allow_prefiller: Option<Vec<String>>,
    /// Allow only Pods of --inference-pool as prefill engines [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    enable_ssrf_protection: Option<bool>,
    /// InferencePool of the prefill engines, also by INFERENCE_POOL
    #[arg(long, value_name = "NAMESPACE/NAME")]
    inference_pool: Option<String>,
    /// API group of the InferencePool [default: inference.networking.k8s.io]
    #[arg(long, value_name = "GROUP")]
    pool_group: Option<String>,
    /// Draw the prefill engine from the header's list instead of the first, also by ENABLE_PREFILLER_SAMPLING
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    enable_prefiller_sampling: Option<bool>,
    /// Retries of a prefill that the engine failed [default: 0]
    #[arg(long, value_name = "N")]
    prefill_max_retries: Option<u16>,
    /// Longest pause before the second and each further retry [default: 200ms]
    #[arg(long, value_name = "DURATION")]
    prefill_retry_backoff: Option<String>,
    /// Accepted and without effect: a connection stays open for its idle time
    #[arg(long, value_name = "N")]
    max_idle_conns_per_host: Option<u32>,
    /// Port of /metrics for monitors; 0: none [default: 0]
    #[arg(long, value_name = "PORT")]
    metrics_port: Option<u16>,
    /// Settings as YAML text, by the names of these options
    #[arg(long, value_name = "YAML", conflicts_with = "configuration_file")]
    pub(crate) configuration: Option<String>,
    /// File with settings as YAML
    #[arg(long, value_name = "FILE")]
    pub(crate) configuration_file: Option<PathBuf>,
    #[command(flatten)]
    other: OtherFlags,
    #[arg(long, hide = true)]
    pub(crate) until_stdin_ends: bool,
}

impl SidecarArgs {
    /// What the flags set.
    pub(crate) fn settings(&self) -> SidecarSettings {
        SidecarSettings {
            port: self.port,
            model_server_port: self.model_server_port,
            vllm_port: self.vllm_port,
            data_parallel_size: self.data_parallel_size,
            kv_connector: self.kv_connector.clone(),
            enable_ssrf_protection: self.enable_ssrf_protection,
            enable_prefiller_sampling: self.enable_prefiller_sampling,
            secure_proxy: self.secure_proxy,
            cert_path: self.cert_path.clone(),
            enable_tls: self.enable_tls.clone(),
            tls_insecure_skip_verify: self.tls_insecure_skip_verify.clone(),
            inference_pool: self.inference_pool.clone(),
            pool_group: self.pool_group.clone(),
            max_idle_conns_per_host: self.max_idle_conns_per_host,
            prefill_max_retries: self.prefill_max_retries,
            prefill_retry_backoff: self.prefill_retry_backoff.clone(),
            metrics_port: self.metrics_port,
            allow_prefiller: self.allow_prefiller.clone(),
            host: self.host,
            tls_ca_path: self.tls_ca_path.clone(),
            cluster_secret_file: self.cluster_secret_file.clone(),
            cluster_secret_stages: self.cluster_secret_stages.clone(),
            sglang_bootstrap_port: None,
            pod_ip: None,
            other: self.other.0.iter().map(|(name, value)| (name.clone(), value.as_str().into())).collect(),
        }
    }
}

/// The flags of llm-d's sidecar that this one names in an error. Hidden, because they do nothing.
#[derive(Debug)]
struct OtherFlags(BTreeMap<String, String>);

impl Args for OtherFlags {
    fn augment_args(command: Command) -> Command {
        UNSUPPORTED.iter().fold(command, |command, (name, ..)| {
            let arg = Arg::new(*name).value_parser(ValueParser::string()).hide(true);
            let arg = match name.len() {
                1 => arg.short(name.chars().next()),
                _ => arg.long(*name),
            };
            command.arg(arg.num_args(0..=1).default_missing_value("true").help("Not supported"))
        })
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for OtherFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let set = UNSUPPORTED
            .iter()
            .filter_map(|(name, ..)| Some(((*name).to_owned(), matches.get_one::<String>(name)?.clone())));
        Ok(Self(set.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
