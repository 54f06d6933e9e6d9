// The search of the site runs in a Worker, which browsers refuse to a page opened from disk: there it runs in a hidden frame.
// Messages are copied and come later, as a Worker's do: the search changes what it is given, and may not be answered while it asks.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      const inside = this.frame.contentWindow;
      const script = inside.document.createElement("script");
      this.loaded = new Promise((resolve) => (script.onload = resolve));
      inside.postMessage = (data) => later(data, (event) => this.onmessage?.(event));
      script.onerror = (event) => this.onerror?.(event);
      script.src = new URL(url, location.href);
      inside.document.head.append(script);
    }

    postMessage(data) {
      this.loaded.then(() => later(data, (event) => this.frame.contentWindow?.onmessage(event)));
    }

    terminate() {
      this.frame.remove();
    }
  };

  const later = (data, handle) => {
    const event = { data: structuredClone(data) };
    setTimeout(() => handle(event));
  };
}
