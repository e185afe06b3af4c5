//! The protocol's methods: the list of tools, and calls of them.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, Ordering},
};

use envd::guest_text;
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, Implementation,
        ListToolsResult, PaginatedRequestParams, ServerCapabilities, ServerConfig, Tool,
    },
    service::RequestContext,
};
use tokio::{sync::Semaphore, task::spawn_blocking};

use super::{
    sandboxes::Sandboxes,
    tools::{self, Call},
};

/// Maximum number of calls that run at the same time; others wait.
const MAX_CALLS: usize = 16;

/// The tools of one server, for all of its clients.
#[derive(Clone)]
pub(super) struct Tools {
    sandboxes: Arc<Sandboxes>,
    listed: Arc<[Tool]>,
    calls: Arc<Semaphore>,
}

/// Cancellation of a call.
#[derive(Default)]
pub(super) struct Stop {
    is_set: AtomicBool,
    /// The sandbox and the tag of the process that the call has started.
    pub(super) process: OnceLock<(String, String)>,
}

impl Stop {
    pub(super) fn set(&self) {
        self.is_set.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Relaxed)
    }
}

impl Tools {
    pub(super) fn new(sandboxes: Arc<Sandboxes>) -> Self {
        Self {
            sandboxes,
            listed: tools::listed().into(),
            calls: Arc::new(Semaphore::new(MAX_CALLS)),
        }
    }
}

impl ServerHandler for Tools {
    fn get_info(&self) -> ServerConfig {
        let limits = &self.sandboxes.limits;
        let instructions = format!(
            "Disposable Linux microVMs for untrusted code. `create` one, then use its id. At most {} at the same time, \
             with network access to: {}. A sandbox ends {} after its last use, and all end with this server. Of output \
             beyond {} bytes the middle is left out: write large output to a file and read parts of it.",
            limits.max_sandboxes,
            limits.allowed().join(", "),
            humantime::format_duration(limits.timeout),
            limits.max_output,
        );
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(Implementation::new("cube", env!("CARGO_PKG_VERSION")))
            .with_instructions(instructions)
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(self.listed.to_vec()))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let named = self.listed.iter().find(|tool| tool.name == request.name);
        let Some(tool) = named.cloned() else {
            let why = format!("unknown tool: {}", guest_text(&request.name));
            return Err(ErrorData::invalid_params(why, None));
        };
        let _permit = self.calls.acquire().await.map_err(failed)?;
        let stop = Arc::new(Stop::default());
        let (sandboxes, of_call) = (Arc::clone(&self.sandboxes), Arc::clone(&stop));
        let arguments = request.arguments.unwrap_or_default();
        let mut call = spawn_blocking(move || {
            tools::run(
                &tool,
                &Call {
                    sandboxes: &sandboxes,
                    stop: &of_call,
                    arguments,
                },
            )
        });
        let done = tokio::select! {
            done = &mut call => done,
            () = context.ct.cancelled() => {
                stop.set();
                let sandboxes = Arc::clone(&self.sandboxes);
                let killed = spawn_blocking(move || tools::kill_process(&sandboxes, &stop));
                killed.await.map_err(failed)?;
                call.await
            }
        };
        let result = done.map_err(failed)?;
        let failure = |why: crate::failure::Failure| vec![ContentBlock::text(why.to_string())];
        Ok(result
            .unwrap_or_else(|why| CallToolResult::error(failure(why)))
            .into())
    }
}

fn failed(why: impl std::error::Error) -> ErrorData {
    ErrorData::internal_error(format!("the call failed: {why}"), None)
}
