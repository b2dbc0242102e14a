"""The loop under every chunked head: logits of a few rows, their softmax in place, their gradient in place.

Per chunk of r rows, with x the r x V logits buffer (allocated once, reused):

    x = h_c W'                      one product
    x = p = softmax(x)              in place; lse = max(x) - log(max(p)), exact because max(p) >= 1/V
    x = g = dloss/dlogits           in place: row scaling, one column per row repaired
    dh_c = g W ;  dW += g' h_c      two products

Three products in all, the same as the plain path: the gradient is made while the softmax is still in cache.
No operator here depends on a value, and none allocates inside itself in float32 or float64 (checked against
the allocator's events): scalars are given as `alpha=`/`value=` or as 0-d tensors, never wrapped on the way,
and mixed dtypes meet only in `copy_`. (In bfloat16 products, the case of accelerators, also in `add_`; there
the CPU allocates inside both `mm` and `add_`, which is one reason why it computes in float32.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from skimp.core.errors import DataError
from skimp.core.memory.tracker import scope
from skimp.core.repeat import rounds
from skimp.losses.head_spec import HeadSpec

#: The buffers a memory report calls logits; the others are workspace.
LOGITS = ("logits", "capped", "tile_low")


class HeadLoop:
    """Runs a `HeadSpec` over its chunks.

    Args:
        spec: sizes, dtypes, options.
        hidden: (N, H). weight: (V, H). bias: (V,) in `spec.exact`, or None.
        labels: (N, 1) int64, every value within 0 .. V-1 (ignored rows carry 0 and a zero scale).
    """

    def __init__(self, spec: HeadSpec, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> None:
        self.spec, self.hidden, self.weight, self.bias, self.labels = spec, hidden, weight, bias, labels
        device = hidden.device
        self.scale_in: Tensor | None = None
        self.cap: Tensor | None = None
        if spec.softcap is not None:
            self.scale_in = torch.full((), (spec.logit_scale or 1.0) / spec.softcap, dtype=spec.exact, device=device)
            self.cap = torch.full((), spec.softcap, dtype=spec.exact, device=device)
        elif spec.logit_scale is not None:
            self.scale_in = torch.full((), spec.logit_scale, dtype=spec.exact, device=device)
        self.buf: dict[str, Tensor] = {}
        for name, (shape, dtype) in spec.buffers().items():
            with scope("logits" if name in LOGITS else "workspace"):
                self.buf[name] = torch.empty(shape, dtype=dtype, device=device)
        if "ones" in self.buf:
            self.buf["ones"].fill_(1.0)

    def run(
        self,
        losses: Tensor | None = None,
        scale: Tensor | None = None,
        dh: Tensor | None = None,
        dw: Tensor | None = None,
        db: Tensor | None = None,
        correct: Tensor | None = None,
    ) -> None:
        """Go through all chunks.

        Args:
            losses: (N, 1) written with each token's unweighted loss.
            scale: (N, 1) d(total)/d(loss of token), times the logit scale; needed for any gradient.
            dh: (N, H) written. dw: (V, H) added to. db: (V,) in `spec.exact`, added to.
            correct: (N, 1) int64, written with the index of the largest logit.
        """
        spec = self.spec
        for start in rounds(range(0, spec.tokens, spec.rows)):
            stop = min(start + spec.rows, spec.tokens)
            h = self.hidden[start:stop]
            if "hidden_cast" in self.buf:
                h = self.buf["hidden_cast"][: stop - start].copy_(h)
            x = self.buf["logits"][: stop - start]
            self._logits(x, h)
            if correct is not None:
                torch.argmax(x, 1, keepdim=True, out=correct[start:stop])
            labels = self.labels[start:stop]
            self._softmax(x, labels, None if losses is None else losses[start:stop])
            if scale is not None and spec.grad:
                self._gradient(x, labels, scale[start:stop])
                self._products(x, h, None if dh is None else dh[start:stop], dw, db)

    def _weight(self, start: int, stop: int) -> Tensor:
        part = self.weight[start:stop]
        if "weight_cast" in self.buf:
            return self.buf["weight_cast"][: stop - start].copy_(part)
        return part

    def _low(self, rows: int, columns: int) -> Tensor:
        return self.buf["tile_low"][: rows * columns].view(rows, columns)

    def _logits(self, x: Tensor, h: Tensor) -> None:
        """x = logits after bias, scale and cap."""
        for start, stop in self.spec.tiles():
            part = x if stop - start == self.spec.vocab else x[:, start:stop]
            w = self._weight(start, stop)
            if self.spec.low:
                part.copy_(torch.mm(h, w.t(), out=self._low(x.shape[0], stop - start)))
            else:
                torch.mm(h, w.t(), out=part)
        if self.bias is not None:
            x.add_(self.bias)
        if self.scale_in is not None:
            x.mul_(self.scale_in)
        if self.cap is not None:
            x.tanh_()
            if "capped" in self.buf:
                self.buf["capped"][: x.shape[0]].copy_(x)
            x.mul_(self.cap)

    def _softmax(self, x: Tensor, labels: Tensor, losses: Tensor | None) -> None:
        """x becomes its softmax; the token losses are written on the way."""
        spec, r = self.spec, x.shape[0]
        lse, top, target = (self.buf[k][:r] for k in ("lse", "top", "target"))
        take(x, labels, target)
        if spec.smoothing:
            torch.sum(x, 1, keepdim=True, out=self.buf["total"][:r])
        torch.amax(x, 1, keepdim=True, out=lse)
        torch.softmax(x, 1, out=x)
        torch.amax(x, 1, keepdim=True, out=top)
        lse.sub_(top.log_())
        if losses is None:
            return
        torch.sub(lse, target, alpha=1.0 - spec.smoothing, out=losses)
        if spec.smoothing:
            losses.add_(self.buf["total"][:r], alpha=-spec.smoothing / spec.vocab)
        if spec.z_loss:
            losses.addcmul_(lse, lse, value=spec.z_loss)

    def _gradient(self, x: Tensor, labels: Tensor, scale: Tensor) -> None:
        """x, the softmax, becomes scale * d(loss)/d(logits before cap)."""
        spec, r = self.spec, x.shape[0]
        lse, top, target = (self.buf[k][:r] for k in ("lse", "top", "target"))
        if spec.z_loss:
            x.mul_(torch.addcmul(scale, scale, lse, value=2.0 * spec.z_loss, out=top))
        else:
            x.mul_(scale)
        if spec.smoothing:
            x.sub_(scale, alpha=spec.smoothing / spec.vocab)
        torch.gather(x, 1, labels, out=target)
        target.sub_(scale, alpha=1.0 - spec.smoothing)
        x.scatter_(1, labels, target)
        if self.cap is not None:
            t = self.buf["capped"][:r]
            x.addcmul_(x, t.mul_(t), value=-1)  # d tanh = 1 - tanh^2

    def _products(self, x: Tensor, h: Tensor, dh: Tensor | None, dw: Tensor | None, db: Tensor | None) -> None:
        """The two gradient products. The hidden gradient sums over vocabulary tiles in `spec.exact`."""
        spec, r = self.spec, x.shape[0]
        if db is not None:
            db.addmv_(x.t(), self.buf["ones"][:r])
        if dh is None and dw is None:
            return
        total = self.buf["dh"][:r] if "dh" in self.buf else dh
        for start, stop in spec.tiles():
            g = x if stop - start == spec.vocab else x[:, start:stop]
            if spec.low:
                g = self._low(r, stop - start).copy_(g)
            if dw is not None:
                self._add_weight_gradient(dw[start:stop], g, h)
            if total is not None:
                self._add_hidden_gradient(total, g, self._weight(start, stop), first=start == 0)
        if dh is not None and total is not None and total is not dh:
            dh.copy_(total)

    def _add_hidden_gradient(self, total: Tensor, g: Tensor, w: Tensor, first: bool) -> None:
        if "dh_low" in self.buf:
            part = torch.mm(g, w, out=self.buf["dh_low"][: g.shape[0]])
            total.copy_(part) if first else total.add_(part)
        elif first:
            torch.mm(g, w, out=total)
        else:
            total.addmm_(g, w)

    def _add_weight_gradient(self, dw: Tensor, g: Tensor, h: Tensor) -> None:
        """dw += g' h. With a detour each chunk is rounded at most once, in the operands' or in dw's dtype."""
        if not self.spec.grad_detour:
            dw.addmm_(g.t(), h)
            return
        for start in rounds(range(0, dw.shape[0], self.spec.grad_tile)):
            part, columns = dw[start : start + self.spec.grad_tile], g[:, start : start + self.spec.grad_tile]
            work = self.buf["dw"][: part.shape[0]]
            if self.spec.low:
                part.add_(torch.mm(columns.t(), h, out=work))
            else:
                work.copy_(part)
                part.copy_(work.addmm_(columns.t(), h))


def take(x: Tensor, labels: Tensor, out: Tensor) -> Tensor:
    """out[i] = x[i, labels[i]]; a label outside the vocabulary is an error of the data."""
    try:
        return torch.gather(x, 1, labels, out=out)
    except (RuntimeError, IndexError) as error:
        if "out of bounds" not in str(error):
            raise
        raise DataError(
            f"labels within 0 .. {x.shape[1] - 1}",
            str(error),
            f"the head has {x.shape[1]} rows and cannot predict another token",
            "use the tokenizer that belongs to this model, or mark the token with ignore_index",
        ) from error
