//! `cube mcp`: an MCP server whose tools are sandboxes.
//!
//! ```text
//! standard streams, or http ─► server ─► tools ─► sandboxes ─► crate::server
//! ```
//! A model chooses tools and arguments, so [`tools`] checks and bounds every argument, and failures are results that
//! name cause and cure. [`sandboxes`] reaches only what this server has created, and ends it when the server ends.

mod http;
mod output;
mod sandboxes;
mod server;
mod tools;

use std::{sync::Arc, thread, time::Duration};

use clap::Args;
use rmcp::{
    ServiceExt,
    service::ServerInitializeError,
    transport::{async_rw::AsyncRwTransport, stdio},
};
use tokio::sync::oneshot;

use crate::{attach, command_args::duration, context::Context, failure::Failure};
use sandboxes::Sandboxes;
use server::Tools;

/// Largest message of a client in bytes. The largest argument fits, escaped.
const MAX_MESSAGE: usize = 8 << 20;

#[derive(Args, Debug)]
pub(crate) struct McpArgs {
    #[command(flatten)]
    limits: Limits,
    #[command(flatten)]
    http: http::HttpArgs,
}

/// Limits for the clients of a server.
#[derive(Args, Clone, Debug)]
pub(super) struct Limits {
    /// Template of new sandboxes [default: code-interpreter-v1, or base on servers without it]
    #[arg(long, value_name = "T")]
    template: Option<String>,
    /// Time without use after which a sandbox ends
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = duration)]
    timeout: Duration,
    /// Maximum number of sandboxes at the same time, and of snapshots
    #[arg(long, value_name = "N", default_value = "5", value_parser = number(1, 100))]
    max_sandboxes: u32,
    /// Maximum size of a result's output in bytes; the middle of longer output is left out
    #[arg(long, value_name = "BYTES", default_value = "32768", value_parser = number(1024, 1 << 20))]
    max_output: u32,
    /// Destination that sandboxes may reach: internet, or a host name, address or CIDR block; may be repeated
    /// [default: none]
    #[arg(long, value_name = "HOST")]
    allow: Vec<String>,
}

fn number(least: i64, most: i64) -> clap::builder::RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(least..=most)
}

impl Limits {
    /// The destinations that sandboxes may reach.
    fn allowed(&self) -> Vec<String> {
        match self.allow.as_slice() {
            [] => vec!["none".to_owned()],
            allowed => allowed.to_vec(),
        }
    }
}

/// Serves until the client closes standard input, or a signal arrives.
pub(crate) fn run(context: &Context, args: &McpArgs) -> Result<(), Failure> {
    let ending = attach::ending();
    let (signalled, signal) = oneshot::channel();
    thread::spawn(move || ending.wait().map(|_| signalled.send(())));
    let door = args.http.door()?;
    let sandboxes = Arc::new(Sandboxes::of(context.server()?, &args.limits)?);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|why| Failure::host(format!("cannot start the server: {why}")))?;
    let tools = Tools::new(Arc::clone(&sandboxes));
    let served = runtime.block_on(async {
        let serve = async {
            match door {
                Some(door) => http::serve(door, tools).await,
                None => over_stdio(tools).await,
            }
        };
        tokio::select! {
            served = serve => served,
            _ = signal => Ok(()),
        }
    });
    // A read of standard input cannot be cancelled.
    runtime.shutdown_background();
    sandboxes.end();
    served
}

async fn over_stdio(tools: Tools) -> Result<(), Failure> {
    let (input, output) = stdio();
    let transport = AsyncRwTransport::new_server(input, output).with_max_line_length(MAX_MESSAGE);
    match tools.serve(transport).await {
        Ok(running) => {
            let ended = running.waiting().await;
            ended.map_or_else(
                |why| Err(Failure::refused(format!("the server failed: {why}"))),
                |_| Ok(()),
            )
        }
        Err(ServerInitializeError::ConnectionClosed(_)) => Ok(()),
        Err(why) => Err(
            Failure::refused(format!("the client did not begin a session: {why}"))
                .with_cure("`cube mcp` is started by an MCP client, such as `claude mcp add`"),
        ),
    }
}
