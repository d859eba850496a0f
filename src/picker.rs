//! `baton picker`.

use std::time::Duration;

use baton_router::{ConfigFile, Picker};

use crate::cli::PickerArgs;
use crate::router::follow;
use crate::{Failure, output, shutdown};

/// Prints one line to standard output for people and supervisors:
/// `baton picker: ready grpc=ADDR health=ADDR admin=ADDR`.
pub(crate) fn run(args: &PickerArgs) -> Result<(), Failure> {
    let (file, config) = ConfigFile::load(&args.config)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let stop = shutdown::on_signal(args.until_stdin_ends)?;
        let picker = Picker::bind(config).await?;
        output::say(format_args!(
            "baton picker: ready grpc={} health={} admin={}",
            picker.local_addr(),
            picker.health_addr(),
            picker.admin_addr()
        ));
        let _following = follow(picker.reload(), file)?;
        picker.run(stop).await;
        output::say(format_args!("baton picker: stopped"));
        Ok(())
    });
    // A look-up on a hanging file system or name server does not delay the exit.
    runtime.shutdown_timeout(Duration::from_secs(1));
    ended
}
