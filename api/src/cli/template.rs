//! `cube-api template`: requests to a running server. The server's pool owns the state directory, so this command never
//! accesses the directory itself.

use clap::{Args, Subcommand, ValueEnum};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::{Method, Request, Uri, body::Bytes};
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use rest::{RestError, Template};

use super::{Failure, failure};

/// Maximum size of a response body in bytes.
const MAX_ANSWER: usize = 16 << 20;

#[derive(Subcommand)]
pub(super) enum TemplateCommand {
    /// List all templates
    List {
        #[command(flatten)]
        server: Server,
    },
    /// Show all properties of a template
    Inspect {
        /// Id or name
        template: String,
        #[command(flatten)]
        server: Server,
    },
    /// Delete a template; its running sandboxes are not affected
    Delete {
        /// Id or name
        template: String,
        #[command(flatten)]
        server: Server,
    },
}

#[derive(Args)]
pub(super) struct Server {
    /// URL of the server; only http:// is supported
    #[arg(long, env = "E2B_API_URL", default_value = "http://127.0.0.1:3000")]
    url: String,
    /// API key with the scope templates:read, or templates:write to delete
    #[arg(long, env = "E2B_API_KEY", hide_env_values = true, default_value = "")]
    key: String,
    /// Output format
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
                        "template {template:?} does not exist: `cube-api template list` lists the templates"
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
        Failure::TargetUnreachable(format!("the response is not a list of templates: {why}"))
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
                &"only http:// is supported: use the loopback address of the server",
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
        let message = serde_json::from_slice::<RestError>(&body).map(|error| error.message);
        let message = message.unwrap_or_else(|_| status.to_string());
        Err(Failure::Usage(format!(
            "the server refused the request: {message}"
        )))
    }
}
