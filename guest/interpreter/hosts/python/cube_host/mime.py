"""From what IPython's formatters give to the results that clients read."""

import base64
import sys

from IPython.core.formatters import BaseFormatter, JSONFormatter
from traitlets import ObjectName, Unicode

from .cells import strip_quotes

# Names of types of content in results. Others go into `extra` under their own name.
KEYS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}
# A line of the control socket is shorter than 64 MiB.
MAX_EVENT = 60 << 20


def event(data, main):
    """The event for a bundle of content by type."""
    fields, extra = {"type": "result"}, {}
    for kind, content in data.items():
        if isinstance(content, tuple):
            # Content with metadata, which clients do not get.
            content = content[0]
        if isinstance(content, (bytes, bytearray)):
            content = base64.b64encode(content).decode()
        if content is None:
            continue
        if kind == "text/plain":
            content = strip_quotes(str(content))
        key = KEYS.get(kind)
        if key is not None:
            fields[key] = content
        else:
            extra[kind] = content
    if extra:
        fields["extra"] = extra
    fields["is_main_result"] = main
    line = encode(fields)
    if len(line) > MAX_EVENT:
        text = "<a result of %d bytes, which is more than can be sent>" % len(line)
        line = encode({"type": "result", "text": text, "is_main_result": main})
    return line


def encode(fields):
    import orjson

    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(fields, default=plain, option=options).decode()


def plain(thing):
    """What JSON has no word for."""
    if hasattr(thing, "isoformat"):
        return thing.isoformat()
    if hasattr(thing, "tolist"):
        return thing.tolist()
    return str(thing)


def as_json(thing):
    """A list or dictionary if it has the form of JSON, else None."""
    import orjson

    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        orjson.dumps(thing, option=options)
    except TypeError:
        return None
    return thing


class DataFormatter(BaseFormatter):
    """Data frames as lists by column."""

    format_type = Unicode("e2b/data")
    print_method = ObjectName("_repr_e2b_data_")
    _return_type = (dict, str)

    def __call__(self, thing):
        # Whoever has a data frame has loaded pandas.
        pandas = sys.modules.get("pandas")
        if pandas is None or not isinstance(thing, pandas.DataFrame):
            return super().__call__(thing)
        return thing.to_dict(orient="list")


class ChartFormatter(BaseFormatter):
    """Figures of matplotlib as the numbers that were drawn."""

    format_type = Unicode("e2b/chart")
    print_method = ObjectName("_repr_e2b_chart_")
    _return_type = (dict, str)

    def __call__(self, thing):
        figure = sys.modules.get("matplotlib.figure")
        if figure is None or not isinstance(thing, figure.Figure):
            return super().__call__(thing)
        import warnings

        from e2b_charts import chart_figure_to_dict

        try:
            with warnings.catch_warnings():
                # What it thinks of numpy's numbers is not the user's business.
                warnings.simplefilter("ignore")
                return chart_figure_to_dict(thing) or None
        except Exception:  # noqa: BLE001 - a figure that cannot be read is still shown as an image
            return None


class JsonFormatter(JSONFormatter):
    """Lists and dictionaries as JSON too, where they have that form."""

    def __call__(self, thing):
        return as_json(thing) if type(thing) in (list, dict) else super().__call__(thing)


def register(shell):
    """Adds these formatters to IPython's."""
    display_formatter = shell.display_formatter
    formatters = display_formatter.formatters
    formatters["e2b/data"] = DataFormatter(parent=display_formatter)
    formatters["e2b/chart"] = ChartFormatter(parent=display_formatter)
    formatters["application/json"] = JsonFormatter(parent=display_formatter)
    try:
        show_saved_images()
    except ImportError:
        # Without Pillow there are no images to save.
        pass


def show_saved_images():
    """An image that is saved to a file is also shown, as in official sandboxes."""
    from IPython.display import display
    from PIL.Image import Image

    save = Image.save

    def save_and_show(image, fp, format=None, **parameters):
        if isinstance(fp, str):
            display(image)
        save(image, fp, format, **parameters)

    Image.save = save_and_show
