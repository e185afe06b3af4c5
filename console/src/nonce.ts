// xterm.js writes its theme into <style> elements that it creates. The page's policy allows such an element only with the
// nonce of this answer, so every <style> that this page creates gets it. Nothing else creates one.

const nonce = document.querySelector<HTMLMetaElement>('meta[name="style-nonce"]')?.content ?? "";
const create = document.createElement.bind(document);

document.createElement = ((name: string, options?: ElementCreationOptions) => {
  const element = create(name, options);
  if (element instanceof HTMLStyleElement) {
    element.nonce = nonce;
  }
  return element;
}) as typeof document.createElement;

// It also writes 24-bit colours, and those that contrast needs, into the attribute of that name, which the policy forbids.
// The object model of styles is allowed.
const set = Element.prototype.setAttribute;
Element.prototype.setAttribute = function (name: string, value: string) {
  if (name === "style" && this instanceof HTMLElement) {
    this.style.cssText = value;
  } else {
    set.call(this, name, value);
  }
};
