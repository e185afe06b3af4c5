//! `cube-api template`: questions to a running server. The pool of a running server owns the state directory, so
//! nothing is done behind its back.

use api_types::rest::{RestError, Template};
use clap::{Args, Subcommand, ValueEnum};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Method, Request, Uri, body::Bytes};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use super::{Failure, failure};

/// No list of templates is longer.
const MAX_ANSWER: usize = 16 << 20;

#[derive(Subcommand)]
pub(super) enum TemplateCommand {
    /// Show all templates
    List {
        #[command(flatten)]
        server: Server,
    },
    /// Show everything about one
    Inspect {
        /// Id or name
        template: String,
        #[command(flatten)]
        server: Server,
    },
    /// Remove one; its running sandboxes go on
    Delete {
        /// Id or name
        template: String,
        #[command(flatten)]
        server: Server,
    },
}

#[derive(Args)]
pub(super) struct Server {
    /// The server, over plain HTTP
    #[arg(long, env = "E2B_API_URL", default_value = "http://127.0.0.1:3000")]
    url: String,
    /// A key with templates:read (and templates:write to remove)
    #[arg(long, env = "E2B_API_KEY", hide_env_values = true, default_value = "")]
    key: String,
    /// How answers are printed
    #[arg(long, value_enum, default_value = "human")]
    format: Format,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Human,
    Json,
}

pub(super) fn run(command: TemplateCommand) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|why| failure(Failure::UnsuitableHost, &why))?;
    runtime.block_on(async {
        match command {
            TemplateCommand::List { server } => show(&server, &list(&server).await?),
            TemplateCommand::Inspect { template, server } => {
                let mut templates = list(&server).await?;
                templates.retain(|t| t.template_id == template || t.names.contains(&template));
                if templates.is_empty() {
                    return Err(Failure::Usage(format!(
                        "there is no template {template:?}; `template list` shows them"
                    )));
                }
                show(&server, &templates)
            }
            TemplateCommand::Delete { template, server } => {
                let segment = utf8_percent_encode(&template, NON_ALPHANUMERIC);
                let path = format!("/templates/{segment}");
                server.ask(Method::DELETE, &path).await.map(drop)
            }
        }
    })
}

async fn list(server: &Server) -> Result<Vec<Template>, Failure> {
    let bytes = server.ask(Method::GET, "/templates").await?;
    serde_json::from_slice(&bytes).map_err(|why| {
        Failure::TargetUnreachable(format!("the answer is no list of templates: {why}"))
    })
}

fn show(server: &Server, templates: &[Template]) -> Result<(), Failure> {
    match server.format {
        Format::Json => {
            let text = serde_json::to_string_pretty(templates);
            println!("{}", text.map_err(|why| failure(Failure::Bug, &why))?);
        }
        Format::Human => {
            for t in templates {
                let names = t.names.join(",");
                println!(
                    "{}  {} vCPU  {} MiB  disk {} MiB  started {}  {names}",
                    t.template_id, t.cpu_count, t.memory_mb, t.disk_size_mb, t.spawn_count
                );
            }
        }
    }
    Ok(())
}

impl Server {
    async fn ask(&self, method: Method, path: &str) -> Result<Bytes, Failure> {
        let url = format!("{}{path}", self.url.trim_end_matches('/'));
        let usage = |why: &dyn std::fmt::Display| Failure::Usage(format!("{url}: {why}"));
        let uri: Uri = url.parse().map_err(|why| usage(&why))?;
        if uri.scheme_str() != Some("http") {
            return Err(usage(
                &"only http:// is spoken here; use the server's loopback address",
            ));
        }
        let request = Request::builder()
            .method(method)
            .uri(uri)
            .header("x-api-key", &self.key)
            .body(Empty::<Bytes>::new())
            .map_err(|why| usage(&why))?;
        let client = Client::builder(TokioExecutor::new()).build_http();
        let unreachable = |why: &dyn std::error::Error| {
            Failure::TargetUnreachable(format!("{url}: {}", model::chain(why)))
        };
        let answer = client.request(request).await;
        let answer = answer.map_err(|why| unreachable(&why))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_ANSWER).collect().await;
        let body = body.map_err(|why| unreachable(why.as_ref()))?.to_bytes();
        if status.is_success() {
            return Ok(body);
        }
        let told = serde_json::from_slice::<RestError>(&body).map(|error| error.message);
        let told = told.unwrap_or_else(|_| status.to_string());
        Err(Failure::Usage(format!("the server refuses: {told}")))
    }
}
